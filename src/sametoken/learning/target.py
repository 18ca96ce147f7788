"""Frozen target in training: hidden states of documents, token embedding and output layer.

Legend: N tokens of a batch, n taps, H hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from sametoken.model.config import ModelConfig


class Features(NamedTuple):
    """Hidden states of the target for a batch or a sample.

    Attributes:
        taps: [N, n * H] concatenated outputs of the tapped blocks, in order; [N, 0] without taps.
        last: [N, H] output of the last block AFTER the final norm, which is the input of the output layer.
    """

    taps: Tensor
    last: Tensor


class OuterLayers(NamedTuple):
    """Layers of the target outside its blocks.

    Attributes:
        config: configuration of the target.
        vectors: [V, H] stored token embeddings.
        head: [V, H] output layer, multiplied by the factor of logits.
    """

    config: ModelConfig
    vectors: Tensor
    head: Tensor

    @classmethod
    def of(cls, config: ModelConfig, vectors: Tensor, head: Tensor) -> OuterLayers:
        """Build from a stored output layer, by applying `logits_scale`."""
        return cls(config, vectors, head if config.logits_scale == 1 else head * config.logits_scale)
