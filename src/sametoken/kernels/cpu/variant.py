"""Variant of the compiled library that this process uses, or the reason why there is none."""

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
