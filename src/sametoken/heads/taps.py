"""Layers of a target in options, and those that EAGLE-3 reads by default, as 0-based numbers of blocks."""

from __future__ import annotations

import re
from collections.abc import Iterable

from sametoken.errors import ConfigError


def parse_layers(text: str, layers: int, words: Iterable[str] = ()) -> tuple[int, ...]:
    """Parse a list of blocks, for example "2,8,13".

    Args:
        layers: number of blocks of the target.
        words: other values of the option, for the error message.

    Raises:
        ConfigError: the text is no list of numbers, or the target has no such block.
    """
    if not re.fullmatch(r"\d{1,9}( *, *\d{1,9})*", text):
        others = "".join(f"{word}, " for word in words) + ("or " if words else "")
        raise ConfigError(f"--taps {text!r}: expected {others}blocks from 0 such as 2,8,13")
    taps = tuple(int(tap) for tap in text.split(","))
    if max(taps) >= layers or len(set(taps)) < len(taps):
        raise ConfigError(f"--taps {text}: expected different blocks from 0 to {layers - 1}, which the target has")
    return taps


def default_taps(layers: int) -> tuple[int, ...]:
    """Blocks that EAGLE-3 reads of a target with `layers` blocks, as chosen by SafeAILab, vLLM and SGLang.

    Raises:
        ConfigError: the target has too few blocks for three different ones.
    """
    taps = (1, layers // 2 - 1, layers - 4)
    if not taps[0] < taps[1] < taps[2]:
        raise ConfigError(f"the target has {layers} blocks, expected at least 7 for the usual taps; name them (--taps)")
    return taps
