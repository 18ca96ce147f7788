"""Variant of the compiled library that this process computes with, or the reason why there is none."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import NamedTuple

from sametoken.errors import ConfigError
from sametoken.kernels.cpu.library import Library
from sametoken.kernels.cpu.processor import FILES, VARIANTS, processor_features, rebuild, unsupported

SWITCH = "SAMETOKEN_NATIVE"


class KernelStatus(NamedTuple):
    """Kernels that this process computes with.

    Attributes:
        variant: name of the loaded variant; None where torch computes alone, which is slower.
        features: what this processor has of what any variant asks for, sorted.
        reason: why there is no variant; None where there is one.
        advice: what mends that, with the command; None where nothing does or nothing is wrong.
    """

    variant: str | None
    features: tuple[str, ...]
    reason: str | None = None
    advice: str | None = None


def library() -> Library | None:
    """The best variant that was built and that this machine runs; None where there is none.

    The choice depends on the machine alone, never on a measurement: sums of bfloat16 products differ between variants
    in their last bits, and the same seed must give the same text tomorrow.

    Raises:
        ConfigError: the environment asks for a variant that is not there.
    """
    return _chosen()[0]


def status() -> KernelStatus:
    """Choice of `library`; if it found no variant, the reason and a remedy.

    Raises:
        ConfigError: as `library`.
    """
    return _chosen()[1]


def choose() -> tuple[Library | None, KernelStatus]:
    """Look up the results of `library` and `status` again."""
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
    """Path of a variant that was built, None if it was not."""
    file = Path(__file__).parent / f"_kernels_{FILES.get(variant, variant)}.so"
    return file if file.exists() else None
