"""Compiled variants with the processor features that each requires, and the one that this process uses.

Features have their names in Linux's /proc/cpuinfo on every system.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import shutil
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

from sametoken.errors import ConfigError
from sametoken.kernels.cpu.library import Library

AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx512_bf16", "fma"}
# Required features, best variant first; setup.py has the compiler's flags.
VARIANTS = {
    "amx": AVX512 | {"amx_tile", "amx_bf16", "amx_int8"},
    "avx512": AVX512,
    "avx2": {"avx2", "fma"},
    "neon_bf16": {"asimd", "asimddp", "bf16", "i8mm"},
    "neon_dot": {"asimd", "asimddp"},
    "neon": {"asimd"},
}
# Variant whose file also contains another one, which runs on processors with a matrix unit.
FILES = {"amx": "avx512"}
# Linux on arm64: bits of getauxval's AT_HWCAP (16) and AT_HWCAP2 (26).
HWCAPS = {16: {"asimd": 1, "asimddp": 20}, 26: {"i8mm": 13, "bf16": 14}}
# macOS: names of sysctl.
SYSCTL = {
    "hw.optional.AdvSIMD": "asimd",
    "hw.optional.arm.FEAT_DotProd": "asimddp",
    "hw.optional.arm.FEAT_BF16": "bf16",
    "hw.optional.arm.FEAT_I8MM": "i8mm",
}
KNOWN = set().union(*VARIANTS.values(), *HWCAPS.values())
# Variant with the fewest requirements, by platform.system() and platform.machine().
LEAST = {("Linux", "x86_64"): "avx2", ("Linux", "aarch64"): "neon", ("Darwin", "arm64"): "neon"}
COMPILERS = {"Linux": "for example: apt-get install g++", "Darwin": "xcode-select --install"}
SWITCH = "SAMETOKEN_NATIVE"


@cache
def processor_features() -> frozenset[str]:
    """Features of this processor that some variant needs; empty on systems without a variant."""
    match platform.system(), platform.machine():
        case "Linux", "x86_64":
            found = flags_of(_text("/proc/cpuinfo"))
        case "Linux", "aarch64":
            read = ctypes.CDLL(None).getauxval
            read.restype, read.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
            found = hwcaps_of({key: read(key) for key in HWCAPS})
        case "Darwin", "arm64":
            found = sysctl_of(_output("/usr/sbin/sysctl", "hw.optional"))
        case _:
            found = set()
    return frozenset(found & KNOWN)


def flags_of(cpuinfo: str) -> set[str]:
    """Features in the text of /proc/cpuinfo on x86-64."""
    return next((set(line.split()) for line in cpuinfo.splitlines() if line.startswith("flags")), set())


def hwcaps_of(words: dict[int, int]) -> set[str]:
    """Features in the results of getauxval for each key of `HWCAPS`."""
    return {name for key, bits in HWCAPS.items() for name, bit in bits.items() if words[key] >> bit & 1}


def sysctl_of(lines: str) -> set[str]:
    """Features in the output of `sysctl hw.optional` on macOS: lines of "name: value"."""
    values = dict(line.split(": ", 1) for line in lines.splitlines() if ": " in line)
    return {feature for name, feature in SYSCTL.items() if values.get(name, "0").strip() == "1"}


def unsupported() -> str:
    """Reason why no variant runs on this machine, as text."""
    here = platform.system(), platform.machine()
    if here not in LEAST:
        return f"there are none for {here[0]} on {here[1]}"
    return f"this processor lacks {' or '.join(sorted(VARIANTS[LEAST[here]] - processor_features()))}"


def rebuild() -> str:
    """Advice for building the kernels: a compiler, and the command that installs this package again from its source."""
    again = f"run: pip install --force-reinstall --no-deps {_source()}"
    if any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        return again
    return f"install a C++ compiler ({COMPILERS.get(platform.system(), 'g++ or clang++')}), then {again}"


def _source() -> str:
    """This package as an argument of pip: its folder or address if it was installed from one, else its name."""
    try:
        record = distribution("sametoken").read_text("direct_url.json")
    except PackageNotFoundError:
        record = None
    if record is None:  # from a package index: no wheel, neither a published one nor one in pip's cache
        return "--no-cache-dir --no-binary sametoken sametoken"
    found = json.loads(record)
    url = found["url"].removeprefix("file://")
    if "vcs_info" in found:
        url = f"{found['vcs_info']['vcs']}+{url}@{found['vcs_info']['commit_id']}"
    editable = found.get("dir_info", {}).get("editable", False)
    return f"{'-e' if editable else '--no-cache-dir'} {url}"


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except OSError:
        return ""


class KernelStatus(NamedTuple):
    """Kernels that this process uses.

    Attributes:
        variant: name of the loaded variant; None where torch computes alone, which is slower.
        features: features of this processor that any variant requires, sorted.
        reason: reason why there is no variant; None if there is one.
        advice: remedy, with the command; None if there is none or none is needed.
    """

    variant: str | None
    features: tuple[str, ...]
    reason: str | None = None
    advice: str | None = None


def library() -> Library | None:
    """Best variant that was built and that this machine can run; None if there is none.

    The choice depends on the machine alone, never on a measurement: sums of bfloat16 products differ between variants
    in their last bits, and a seed must give the same text in every run.

    Raises:
        ConfigError: the environment names a variant that is not available.
    """
    return _chosen()[0]


def status() -> KernelStatus:
    """Choice of `library`, with the reason and a remedy if there is no variant.

    Raises:
        ConfigError: as `library`.
    """
    return _chosen()[1]


def choose() -> tuple[Library | None, KernelStatus]:
    """Determine the results of `library` and `status` anew."""
    wanted = os.environ.get(SWITCH, "auto")
    if wanted not in ("auto", "off", *VARIANTS):
        raise ConfigError(f"{SWITCH}={wanted!r}: expected auto, off, {', '.join(VARIANTS)}")
    found = tuple(sorted(processor_features()))
    if wanted == "off":
        return None, KernelStatus(None, found, f"{SWITCH}=off leaves them out", f"unset {SWITCH}")
    names = [name for name in VARIANTS if wanted in ("auto", name) and VARIANTS[name] <= processor_features()]
    reason = "none were built when this package was installed" if names else unsupported()
    for name in names:
        file = file_of(name)
        if file is not None:
            try:
                return Library(name, file), KernelStatus(name, found)
            except OSError as error:
                reason = f"they cannot be loaded: {error}"
    if wanted in VARIANTS:
        raise ConfigError(
            f"{SWITCH}={wanted!r}: not built from these sources, or this CPU or its system does not allow it; use auto"
        )
    return None, KernelStatus(None, found, reason, rebuild() if names else None)


_chosen = cache(choose)


def file_of(variant: str) -> Path | None:
    """Path of a variant's library, None if it was not built."""
    file = Path(__file__).parent / f"_kernels_{FILES.get(variant, variant)}.so"
    return file if file.exists() else None
