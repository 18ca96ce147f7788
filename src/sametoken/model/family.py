"""What a family of decoders is as data, and what several families share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from sametoken.model.keys import Keys
from sametoken.model.rope_config import Defaults, RopeConfig
from sametoken.model.window_config import FULL, SLIDING, Windows, layer_types, one_window, typed_windows


class KnownFacts(Protocol):
    """What is known of a decoder before its family is asked; a `ModelConfig`."""

    @property
    def num_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def rope(self) -> RopeConfig: ...


Facts = dict[str, Any]  # fields of `ModelConfig` in which a decoder differs from a plain one


class Family(NamedTuple):
    """One family.

    Attributes:
        defaults: what absent keys mean.
        differs: from a plain decoder, by its file.
        inner: of a model that reads images too, whose file states the decoder in its `text_config`: values of sizes
            that such files leave out. None for other models.
    """

    defaults: Defaults
    differs: Callable[[Keys, KnownFacts], Facts]
    inner: Mapping[str, int] | None = None


def biases(keys: Keys) -> Facts:
    bias = keys.flag("attention_bias", False)
    return {"qkv_bias": bias, "out_bias": bias}


def every(keys: Keys, plain: KnownFacts, step: int, window: int) -> tuple[list[str], Windows]:
    """Types and windows of layers of which every `step`-th one sees everything, where the file does not say which."""
    absent = [FULL if (i + 1) % step == 0 else SLIDING for i in range(plain.num_layers)]
    types = list(layer_types(keys, plain.num_layers, absent))
    return types, typed_windows(types, one_window(keys, plain.num_layers, absent=window))
