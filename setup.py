"""What pyproject.toml cannot say: the compiled CPU kernels, the wheel's tag, addresses, the README with absolute links.

The kernels are built where there is a compiler for them; the package installs and works without one.

SAMETOKEN_BUILD_KERNELS says which: `auto` (default) those that this compiler can build, `off` none, which gives a wheel
for every machine, `required` all of this machine's, or the build fails.
"""

import os
import platform
import re
from copy import copy
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

# A placeholder: there is no public repository yet. scripts/release_check.py refuses a release that names it.
REPOSITORY = "https://sametoken.invalid/sametoken"
FOLDER = "src/sametoken/kernels/cpu/"
HEADERS = sorted(map(str, Path(FOLDER).glob("*.h")))
COMMON = ["-std=c++17", "-O3", "-g0", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-Wno-uninitialized"]
ARM64 = {
    "neon_bf16": ["-march=armv8.2-a+dotprod+bf16+i8mm"],
    "neon_dot": ["-march=armv8.2-a+dotprod"],
    "neon": ["-march=armv8-a"],
}
# The compiler's flags by system, machine and variant; kernels/cpu/variant.py says what each needs of a processor.
VARIANTS = {
    ("Linux", "x86_64"): {
        # And the code of the variant amx, which runs where the processor has a matrix unit.
        "avx512": [f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "vnni", "bf16")]
        + ["-mfma", "-mamx-tile", "-mamx-bf16", "-mamx-int8"],
        "avx2": ["-mavx2", "-mfma"],
    },
    ("Linux", "aarch64"): ARM64,
    ("Darwin", "arm64"): ARM64,
}
WANTED = os.environ.get("SAMETOKEN_BUILD_KERNELS", "auto")


def extension(name: str, flags: list[str]) -> Extension:
    # Not linked with -pthread: torch, which is loaded before it, brings the threads of the system.
    return Extension(
        f"sametoken.kernels.cpu._kernels_{name}",
        [FOLDER + "decoder.cpp"],
        depends=HEADERS,
        extra_compile_args=COMMON + flags,
        language="c++",
        optional=WANTED == "auto",
    )


class BuildKernels(build_ext):
    """Files that ctypes loads: they know nothing of Python, so no version of it is in their names.

    All variants are compiled side by side, each in a directory of its own, since they have one source.
    """

    def finalize_options(self) -> None:
        super().finalize_options()
        if self.parallel is None:
            self.parallel = True

    def build_extension(self, ext: Extension) -> None:
        own = copy(self)
        own.build_temp = str(Path(self.build_temp, ext.name))
        super(BuildKernels, own).build_extension(ext)

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"


class Wheel(bdist_wheel):
    """A wheel for any Python: of this platform with the kernels that were built, of every platform without any."""

    def run(self) -> None:
        self.run_command("build")
        kernels = self.get_finalized_command("build_ext").get_outputs() if self.distribution.ext_modules else []
        self.root_is_pure = not any(Path(file).exists() for file in kernels)
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", "any" if self.root_is_pure else super().get_tag()[2])


def readme() -> str:
    """README.md for readers outside of the repository: links and pictures lead to its files on the web."""
    places = {"": f"{REPOSITORY}/blob/HEAD/", "!": f"{REPOSITORY}/raw/HEAD/"}  # a link, a picture
    link = r"(!?)(\[[^\]]*\]\()(?![a-z]+:|#)"
    return re.sub(link, lambda found: found[1] + found[2] + places[found[1]], Path("README.md").read_text("utf-8"))


if WANTED not in ("auto", "off", "required"):
    raise SystemExit(f"SAMETOKEN_BUILD_KERNELS={WANTED!r}: expected auto, off or required")
here = (platform.system(), platform.machine())
variants = {} if WANTED == "off" else VARIANTS.get(here, {})
if WANTED == "required" and not variants:
    raise SystemExit(f"SAMETOKEN_BUILD_KERNELS=required: there are no kernels for {' '.join(here)}; use auto or off")
setup(
    project_urls={
        "Repository": REPOSITORY,
        "Documentation": f"{REPOSITORY}/tree/HEAD/docs",
        "Changelog": f"{REPOSITORY}/blob/HEAD/CHANGELOG.md",
        "Issues": f"{REPOSITORY}/issues",
    },
    long_description=readme(),
    long_description_content_type="text/markdown",
    ext_modules=[extension(*variant) for variant in variants.items()],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": Wheel},
)
