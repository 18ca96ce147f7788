"""What a frozen target gives to training: hidden states of documents, its token vectors and its output layer.

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
        vectors: [V, H] of its tokens. `head`: [V, H] its output layer.
    """

    config: ModelConfig
    vectors: Tensor
    head: Tensor
