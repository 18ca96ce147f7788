"""The frozen target in training: hidden states of documents, its token embedding and its output layer.

Legend: N tokens of a batch, n taps, H hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from sametoken.model.config import ModelConfig


class Features(NamedTuple):
    """The target's hidden states of a batch or a sample.

    Attributes:
        taps: [N, n * H] outputs of the tapped blocks side by side, in their order; without taps [N, 0].
        last: [N, H] output of the last block AFTER the target's final norm, which its output layer reads.
    """

    taps: Tensor
    last: Tensor


class OuterLayers(NamedTuple):
    """The target's layers outside its blocks.

    Attributes:
        config: the target's architecture.
        vectors: [V, H] of its tokens, as they are stored.
        head: [V, H] its output layer, times what its scores are multiplied by.
    """

    config: ModelConfig
    vectors: Tensor
    head: Tensor

    @classmethod
    def of(cls, config: ModelConfig, vectors: Tensor, head: Tensor) -> OuterLayers:
        """Build from an output layer in its stored form, which `logits_scale` has not been applied to."""
        return cls(config, vectors, head if config.logits_scale == 1 else head * config.logits_scale)
