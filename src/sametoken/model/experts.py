"""A mixture of experts: a router gives each token to a few small MLPs, and only the weights of those are read.

Each expert multiplies the rows of the tokens that chose it, and a token's results are added in the order of its own
choices: its bits do not depend on which other tokens chose the same expert. Legend: T tokens of the whole batch,
H hidden size, E experts, K chosen ones.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from sametoken.model.config import ModelConfig
from sametoken.model.expert_config import ExpertConfig
from sametoken.model.formats.base import WeightFormat
from sametoken.model.layers import ACTIVATIONS, clamped, gated
from sametoken.model.linear import Linear


class GatedMLP(nn.Module):
    """One expert: down(activation(gate x) * up x), with gate and up as one linear."""

    def __init__(
        self, config: ModelConfig, experts: ExpertConfig, width: int, dtype: torch.dtype, format: WeightFormat | None
    ) -> None:
        super().__init__()
        self.activation, self.clamp = ACTIVATIONS[config.activation], experts.clamp
        self.gate_up = Linear(config.hidden_size, 2 * width, experts.bias, dtype, format)
        self.down = Linear(width, config.hidden_size, experts.bias, dtype, format)

    def forward(self, x: Tensor) -> Tensor:  # [T, H] -> [T, H]
        both = self.gate_up(x)
        fed: Tensor = self.down(gated(self.activation, both) if self.clamp is None else clamped(both, *self.clamp))
        return fed


class Experts(nn.Module):
    """The router, the experts, and the shared expert where there is one; the router is never quantised."""

    def __init__(
        self, config: ModelConfig, experts: ExpertConfig, dtype: torch.dtype, format: WeightFormat | None
    ) -> None:
        super().__init__()
        self.config = experts
        # The shared expert's gate is one more output: a product with one output alone would not keep a row's bits.
        self.router = Linear(config.hidden_size, experts.count + bool(experts.shared), experts.bias, dtype)
        self.each = nn.ModuleList(GatedMLP(config, experts, experts.width, dtype, format) for _ in range(experts.count))
        self.shared = GatedMLP(config, experts, experts.shared, dtype, format) if experts.shared else None

    @property
    def every(self) -> list[GatedMLP]:
        """The experts, and the shared one last."""
        shared = [] if self.shared is None else [self.shared]
        return [*cast("list[GatedMLP]", list(self.each)), *shared]

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The weights of the chosen experts in float32, and which they are, [T, K] each, from logits [T, E]."""
        shares = torch.softmax(logits, -1, dtype=torch.float32)
        weights, chosen = shares.topk(self.config.chosen, -1)
        return (weights / weights.sum(-1, keepdim=True) if self.config.normalised else weights), chosen

    def forward(self, x: Tensor) -> Tensor:  # [T, H] -> [T, H]
        logits = self.router(x)
        weights, chosen = self.route(logits[:, : self.config.count])
        results = x.new_empty(*chosen.shape, x.shape[1])
        for expert in sorted(set(chosen.flatten().tolist())):
            rows, places = torch.nonzero(chosen == expert, as_tuple=True)
            # torch computes a lone row with another kernel than two.
            read = x[rows] if len(rows) > 1 else x[rows].expand(2, -1)
            results[rows, places] = self.each[expert](read)[: len(rows)]
        mixed = torch.zeros_like(x, dtype=torch.float32)
        for place in range(chosen.shape[1]):
            mixed = mixed + results[:, place] * weights[:, place, None]
        if self.shared is not None:
            mixed = mixed + torch.sigmoid(logits[:, self.config.count :]) * self.shared(x)
        return mixed.to(x.dtype)
