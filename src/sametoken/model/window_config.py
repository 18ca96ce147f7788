"""Sliding windows of layers: which layers have one, and its width, read from the files of each family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sametoken.errors import CheckpointError, UnsupportedModelError, shown
from sametoken.model.keys import MOST_WINDOW, Keys

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
NO_WINDOW = (
    f"config.json has {SLIDING!r} in 'layer_types' but no window ('use_sliding_window' is false, or 'sliding_window' "
    "is null), expected both or neither: is this file complete?"
)

# Per layer, the number of tokens that a query sees, itself included; None is full attention.
Windows = tuple[int | None, ...]


def one_window(keys: Keys, layers: int, absent: int | None) -> Windows:
    """One `sliding_window` for all layers; `null` is full attention and an absent key means `absent`."""
    window = keys.values.get("sliding_window", absent)
    return (None if window is None else keys.integer("sliding_window", absent, MOST_WINDOW),) * layers


def qwen_windows(keys: Keys, layers: int, alternating: bool = False) -> Windows:
    """Windows from `layer_types`, or else for the layers from `max_window_layers` on, if windows are used at all.

    Args:
        alternating: without `layer_types`, it is every other layer before `max_window_layers`.
    """
    used = keys.flag("use_sliding_window", False) and keys.values.get("sliding_window", 4096) is not None
    window = keys.integer("sliding_window", 4096, MOST_WINDOW) if used else None
    first = keys.values.get("max_window_layers", 28)
    if isinstance(first, bool) or not isinstance(first, int):
        raise CheckpointError(f"config.json has {shown(first)} for 'max_window_layers', expected an integer")
    windowed = [i % 2 == 0 and i < first if alternating else i >= first for i in range(layers)]
    types = layer_types(keys, layers, [SLIDING if used and each else FULL for each in windowed])
    return typed_windows(types, (window,) * layers)


def layer_types(keys: Keys, layers: int, absent: Sequence[str], window: str = SLIDING) -> Sequence[str]:
    """Value of `layer_types`, or `absent` if the file has none; `window` is the name of layers with a window."""
    types = keys.values.get("layer_types") or list(absent)
    check_layer_types(types, layers, "config.json", window)
    found: Sequence[str] = types
    return found


def typed_windows(types: Sequence[str], windows: Windows) -> Windows:
    """Windows of the layers whose type is sliding; None for the others.

    Raises:
        CheckpointError: such a layer has no window.
    """
    if any(kind == SLIDING and window is None for kind, window in zip(types, windows, strict=True)):
        raise CheckpointError(NO_WINDOW)
    return tuple(window if kind == SLIDING else None for kind, window in zip(types, windows, strict=True))


def check_layer_types(types: Any, layers: int, where: str, window: str = SLIDING) -> None:
    """Raise if `layer_types` is not one supported kind of attention per layer.

    Raises:
        CheckpointError: they are not a list of so many names.
        UnsupportedModelError: a name is not supported.
    """
    if not isinstance(types, list) or len(types) != layers or not all(isinstance(kind, str) for kind in types):
        raise CheckpointError(f"{where} has {shown(types)} for 'layer_types', expected one name per layer")
    if unknown := set(types) - {window, FULL}:
        raise UnsupportedModelError(f"'layer_types' of {where} names {sorted(unknown)}; supported: {window}, {FULL}")
