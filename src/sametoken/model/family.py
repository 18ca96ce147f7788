"""Definition of a family of decoders as data, and functions that several families share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from sametoken.errors import CheckpointError, shown
from sametoken.model.keys import MOST_LAYERS, Keys
from sametoken.model.rope_config import Defaults, RopeConfig
from sametoken.model.window_config import FULL, SLIDING, Windows, layer_types, one_window, typed_windows


class KnownFacts(Protocol):
    """Facts of a decoder that are read before its family's function runs; a `ModelConfig`."""

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
    """Family of decoders.

    Attributes:
        defaults: values of absent keys.
        differs: function from a file's keys to the differences from a plain decoder.
        inner: for multimodal models, whose files have the decoder in `text_config`: values of absent sizes. None for
            other models.
        inner_tie: true if the `tie_word_embeddings` of `text_config` applies, not that of the whole model.
    """

    defaults: Defaults
    differs: Callable[[Keys, KnownFacts], Facts]
    inner: Mapping[str, int] | None = None
    inner_tie: bool = False


def biases(keys: Keys) -> Facts:
    bias = keys.flag("attention_bias", False)
    return {"qkv_bias": bias, "out_bias": bias}


def further_layers(keys: Keys, absent: int) -> int:
    return keys.integer("num_nextn_predict_layers", absent, MOST_LAYERS, least=0)


def rotated_layers(keys: Keys, layers: int) -> list[bool]:
    """Layers that rotate queries and keys: those with 1 in `no_rope_layers`, by default all but every fourth.

    Raises:
        CheckpointError: it is not a list of 0 and 1 for each layer.
    """
    step = keys.integer("no_rope_layer_interval", 4)
    rotated = keys.values.get("no_rope_layers") or [int((i + 1) % step != 0) for i in range(layers)]
    if not isinstance(rotated, list) or len(rotated) != layers or not all(each in (0, 1) for each in rotated):
        raise CheckpointError(
            f"config.json has {shown(rotated)} for 'no_rope_layers', expected 1 (rotated) or 0 per layer"
        )
    return [bool(each) for each in rotated]


def every(keys: Keys, plain: KnownFacts, step: int, window: int) -> tuple[list[str], Windows]:
    """Types and windows of layers if the file states none: every `step`-th layer has full attention."""
    absent = [FULL if (i + 1) % step == 0 else SLIDING for i in range(plain.num_layers)]
    types = list(layer_types(keys, plain.num_layers, absent))
    return types, typed_windows(types, one_window(keys, plain.num_layers, absent=window))
