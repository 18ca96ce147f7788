"""Builds the compiled CPU kernels where there is a compiler for them; the package installs and works without one."""

import platform

from setuptools import Extension, setup

FOLDER = "src/sametoken/native/"
HEADERS = [f"{name}.h" for name in ("attention", "draw", "forward", "linear", "pointwise", "simd", "team")]
COMMON = ["-std=c++17", "-O3", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-Wno-uninitialized"]
VARIANTS = {
    "avx512": [f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "vnni", "bf16")] + ["-mfma"],
    "avx2": ["-mavx2", "-mfma"],
}


def extension(name: str, flags: list[str]) -> Extension:
    # Not linked with -pthread: the runtime that torch brings is used, see native/library.py.
    return Extension(
        f"sametoken.native._kernels_{name}",
        [FOLDER + "decoder.cpp"],
        depends=[FOLDER + header for header in HEADERS],
        extra_compile_args=COMMON + flags,
        language="c++",
        optional=True,
    )


x86 = platform.system() == "Linux" and platform.machine() == "x86_64"
setup(ext_modules=[extension(*variant) for variant in VARIANTS.items()] if x86 else [])
