"""Medusa heads: one module for training and serving.

Legend: T tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sametoken.heads.kind import Head
from sametoken.heads.medusa.config import MedusaConfig
from sametoken.model.formats.base import WeightFormat
from sametoken.model.linear import Linear


class ResBlock(nn.Module):
    """Residual block x + SiLU(linear(x))."""

    def __init__(self, size: int, dtype: torch.dtype, format: WeightFormat | None) -> None:
        super().__init__()
        self.linear = Linear(size, size, True, dtype, format)

    def forward(self, x: Tensor) -> Tensor:  # [T, H] -> [T, H]
        return x + F.silu(self.linear(x))


class MedusaHead(nn.Module):
    """Residual blocks and, if the head has one, an output layer."""

    def __init__(self, config: MedusaConfig, dtype: torch.dtype, format: WeightFormat | None) -> None:
        super().__init__()
        size = config.hidden_size
        self.blocks = nn.ModuleList(ResBlock(size, dtype, format) for _ in range(config.num_layers))
        self.head = Linear(size, config.vocab_size, False, dtype, format) if config.own_heads else None


class MedusaHeads(Head):
    """Heads that guess several tokens in parallel, each one place further, from the target's last normed hidden state.

    Architecture: FasterDecoding/Medusa, with independent blocks.
    """

    config: MedusaConfig

    def __init__(self, config: MedusaConfig, dtype: torch.dtype, format: WeightFormat | None = None) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.heads = nn.ModuleList(MedusaHead(config, dtype, format) for _ in range(config.num_heads))

    @property
    def draft_ids(self) -> Tensor:
        """Ids [V] of all tokens of the target."""
        return torch.arange(self.config.vocab_size)

    def states(self, hidden: Tensor) -> list[Tensor]:
        """Input [T, H] of each head's output layer; head i guesses the token i + 2 places after that of `hidden`."""
        found = []
        for head in self.each():
            x = hidden
            for block in head.blocks:
                x = block(x)
            found.append(x)
        return found

    def logits(self, hidden: Tensor) -> list[Tensor]:
        """Logits [T, V] of each head, by the heads' own output layers."""
        scores = []
        for head, state in zip(self.each(), self.states(hidden), strict=True):
            assert head.head is not None, "heads without output layers use the target's"
            scores.append(head.head(state))
        return scores

    def each(self) -> list[MedusaHead]:
        """Heads in order."""
        return cast("list[MedusaHead]", list(self.heads))
