#!/usr/bin/env bash
# Everything that needs a GPU, in under nine minutes and without a network: tests on CUDA, equal tokens, the table.
#
#   scripts/gpu_check.sh [--out DIR]               a machine with CUDA; torch and transformers within pyproject.toml's bounds
#   scripts/gpu_check.sh --device cpu --tiny       the same programs where there is no GPU; the figures mean nothing
#
# PYTHON names the interpreter (python3). Modules that are missing are installed from the folder WHEELS into a
# temporary one, where it is given. Exit code: 0 all passed, 1 something failed, 2 it could not start.
set -uo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3} device=cuda shape=8b out=
while [ $# -gt 0 ]; do
    case $1 in
        --device) device=$2; shift 2 ;;
        --tiny) shape=tiny; shift ;;
        --out) out=$2; shift 2 ;;
        *) echo "unknown option $1; see the head of $0" >&2; exit 2 ;;
    esac
done

# Prints the modules that cannot be found.
missing() {
    "$python" -c 'import sys; from importlib.util import find_spec
print(*(name for name in sys.argv[1:] if find_spec(name) is None))' "$@"
}

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
if [ -n "${WHEELS:-}" ]; then
    "$python" -m pip install -q --no-index --no-deps --target "$scratch/site" "$WHEELS"/*.whl || exit 2
    export PYTHONPATH="$PYTHONPATH:$scratch/site"
fi
absent=$(missing torch transformers safetensors tokenizers jinja2 pydantic pytest hypothesis)
if [ -n "$absent" ]; then
    echo "cannot import: $absent; put their wheels, with what they need, into a folder and set WHEELS=that folder" >&2
    exit 2
fi
if [ "$device" = cuda ] && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "no CUDA device for this build of torch; try --device cpu --tiny to see the programs run" >&2
    exit 2
fi

begin=$SECONDS failed=0
[ -z "$out" ] || mkdir -p "$out" || exit 2
# Runs one part within its limit of seconds and says how it ended.
part() {
    local name=$1 limit=$2 code start=$SECONDS
    shift 2
    echo "== $name"
    timeout -s INT -k 10 "$limit" "$@" 2>&1 | tee ${out:+"$out/${name// /_}.log"}
    code=${PIPESTATUS[0]}
    [ $code -eq 0 ] || failed=1
    [ $code -eq 124 ] && echo "stopped after its limit of $limit s"
    echo "== $name: exit code $code after $((SECONDS - start)) s"
}

nvidia-smi --query-gpu=name,memory.total,driver_version,clocks.max.sm --format=csv 2>/dev/null
"$python" -c 'import platform, torch, transformers
print("python", platform.python_version(), "torch", torch.__version__, "transformers", transformers.__version__)
print("triton", __import__("triton").__version__ if __import__("importlib.util").util.find_spec("triton") else "none")'

files=(tests/engine/test_captured.py tests/engine/test_cuda.py tests/kernels/test_triton_*.py)
[ $shape = tiny ] || files+=(tests/model/test_families.py tests/engine/test_engine_lossless.py tests/engine/test_engine_behaviour.py)
workers=()
[ -z "$(missing xdist)" ] && [ $shape != tiny ] && workers=(-n 8)
export SAMETOKEN_TEST_DEVICE=$device
marks=(-m "not thorough")
[ -n "$(missing pytest_timeout)" ] || marks+=(--timeout=60)
# Deprecations of other versions are no failures here.
part "tests on $device" "${TESTS_LIMIT:-230}" "$python" -m pytest -v --tb=short -rfE --maxfail="${MAXFAIL:-30}" -W default \
    -p no:cacheprovider "${marks[@]}" "${workers[@]}" "${files[@]}"
[ $shape = tiny ] || part "probe" 60 "$python" benchmarks/gpu_probe.py
size=()
[ $shape = tiny ] && size=(--tokens 24 --rounds 1)
part "equal tokens" 90 "$python" benchmarks/gpu.py --device "$device" --shape $shape --part equality "${size[@]}" \
    ${out:+--out "$out"}
[ $shape = tiny ] || size=(--tokens 192 --rounds 3)
part "speed" "${SPEED_LIMIT:-190}" "$python" benchmarks/gpu.py --device "$device" --shape $shape --part speed "${size[@]}" \
    ${out:+--out "$out"}
echo "== all parts: $([ $failed -eq 0 ] && echo passed || echo FAILED) after $((SECONDS - begin)) s"
exit $failed
