#!/usr/bin/env bash
# The wheels that scripts/gpu_check.sh needs on a machine without a network that has torch, triton, transformers, pytest and
# hypothesis, but not pydantic: for Python 3.12 on Linux x86-64, 3 MB.
#
#   scripts/gpu_wheels.sh DIR        then, there: WHEELS=DIR scripts/gpu_check.sh --out results
set -euo pipefail
[ $# -eq 1 ] || { echo "usage: $0 DIR" >&2; exit 2; }

packages=(pydantic==2.14.3 pydantic-core==2.50.4 annotated-types==0.8.0 typing-inspection==0.4.5 typing-extensions==4.16.0)
mkdir -p "$1"
rm -f "$1"/*.whl # two versions of one package would stop the installation
"${PYTHON:-python3}" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -d "$1" "${packages[@]}"
ls "$1"
