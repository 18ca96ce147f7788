"""What a next-feature head computes: the state of the next token from the state of this one and the next token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from sametoken.errors import ConfigError
from sametoken.heads.kind import Head
from sametoken.model.formats.base import WeightFormat
from sametoken.model.linear import Linear


@dataclass(frozen=True)
class NextFeatureConfig:
    """The sizes of a next-feature head.

    Attributes:
        hidden_size, vocab_size: the target's.
        inner_size: width between the two linear layers.
        dtype: torch name of the dtype that the weights were saved in.
    """

    hidden_size: int
    vocab_size: int
    inner_size: int
    dtype: str = "bfloat16"
    kind = "next_feature"

    def __post_init__(self) -> None:
        for name in ("hidden_size", "vocab_size", "inner_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} of the head is {getattr(self, name)}, expected at least 1")


class NextFeatureHead(Head):
    """One block of two linear layers beside a residual connection.

    Args:
        dtype: of weights and activations.
        format: what the linears are quantised to when they are packed, None for nothing.
    """

    config: NextFeatureConfig

    def __init__(self, config: NextFeatureConfig, dtype: torch.dtype, format: WeightFormat | None = None) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.up = Linear(2 * config.hidden_size, config.inner_size, True, dtype, format)
        self.down = Linear(config.inner_size, config.hidden_size, True, dtype, format)

    @property
    def draft_ids(self) -> Tensor:
        """[V] every token of the target."""
        return torch.arange(self.config.vocab_size)

    def forward(self, embedded: Tensor, state: Tensor) -> Tensor:
        """The next states [T, H].

        Args:
            embedded: [T, H] the target's vectors of the tokens after the states.
            state: [T, H] last hidden states after the target's final norm, or what this head returned before.
        """
        next_state: Tensor = state + self.down(F.silu(self.up(torch.cat([embedded, state], dim=-1))))
        return next_state
