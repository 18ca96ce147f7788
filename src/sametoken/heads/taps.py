"""Layers of a target as options name them, and those that EAGLE-3 reads by default: numbers of blocks, from 0."""

from __future__ import annotations

import re
from collections.abc import Iterable

from sametoken.errors import ConfigError


def parse_layers(text: str, layers: int, words: Iterable[str] = ()) -> tuple[int, ...]:
    """Blocks from "2,8,13".

    Args:
        layers: blocks of the target.
        words: what else the option may be, for the error.

    Raises:
        ConfigError: it is no list of numbers, or the target has no such block.
    """
    if not re.fullmatch(r"\d{1,9}( *, *\d{1,9})*", text):
        others = "".join(f"{word}, " for word in words) + ("or " if words else "")
        raise ConfigError(f"--taps {text!r}: expected {others}blocks from 0 such as 2,8,13")
    taps = tuple(int(tap) for tap in text.split(","))
    if max(taps) >= layers or len(set(taps)) < len(taps):
        raise ConfigError(f"--taps {text}: expected different blocks from 0 to {layers - 1}, which the target has")
    return taps


def default_taps(layers: int) -> tuple[int, ...]:
    """The blocks that EAGLE-3 reads of a target with so many, as SafeAILab, vLLM and SGLang choose them.

    Raises:
        ConfigError: the target has too few blocks for three different ones.
    """
    taps = (1, layers // 2 - 1, layers - 4)
    if not taps[0] < taps[1] < taps[2]:
        raise ConfigError(f"the target has {layers} blocks, expected at least 7 for the usual taps; name them (--taps)")
    return taps
