"""Mixture of experts: a router assigns each token to a few small MLPs, and only their weights are read.

Each expert multiplies the rows of the tokens that chose it, and a token's results are added in the order of its own
choices, so the bits of a token do not depend on other tokens with the same expert. Legend: T tokens of the whole batch,
H hidden size, E experts, K chosen ones.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sametoken.model.config import ModelConfig
from sametoken.model.expert_config import ExpertConfig
from sametoken.model.formats.base import WeightFormat
from sametoken.model.layers import ACTIVATIONS, clamped, gated, in_parts
from sametoken.model.linear import Linear

LEAST_SUM = 1e-20  # added to the sum of chosen weights, to avoid division by 0
VECTORS = 64  # float32 numbers that torch's elementwise functions take at once, on any processor


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
    """The router, the experts, and the shared expert where there is one; the router is never quantised.

    Attributes:
        choice_bias: [E] added to the scores by which experts are chosen, None for no bias. Always float32: the
            differences between experts are small compared to the biases.
    """

    float32 = ("choice_bias",)

    def __init__(
        self, config: ModelConfig, experts: ExpertConfig, dtype: torch.dtype, format: WeightFormat | None
    ) -> None:
        super().__init__()
        self.config = experts
        # The shared expert's gate is one more output: a product with one output alone would not keep a row's bits.
        self.router = Linear(config.hidden_size, experts.router_outputs, experts.bias, dtype, wide=experts.wide_router)
        bias = torch.empty(experts.count, dtype=torch.float32) if experts.choice_bias else None
        self.choice_bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.each = nn.ModuleList(GatedMLP(config, experts, experts.width, dtype, format) for _ in range(experts.count))
        self.shared = GatedMLP(config, experts, experts.shared, dtype, format) if experts.shared else None

    @property
    def every(self) -> list[GatedMLP]:
        """Routed experts, followed by the shared one."""
        shared = [] if self.shared is None else [self.shared]
        return [*cast("list[GatedMLP]", list(self.each)), *shared]

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Weights (float32) and indices of the chosen experts, [T, K] each, from logits [T, E]."""
        facts = self.config
        scores = _sigmoid(logits) if facts.sigmoid else torch.softmax(logits, -1, dtype=torch.float32)
        ranks = logits.float() if facts.weighted_input else scores
        ranks = ranks if self.choice_bias is None else ranks + self.choice_bias
        chosen = _in_best_groups(ranks, facts).topk(facts.chosen, -1).indices
        weights = scores.gather(-1, chosen)
        if facts.normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + LEAST_SUM)
        return weights * facts.weight_scale, chosen

    def forward(self, x: Tensor) -> Tensor:  # [T, H] -> [T, H]
        logits, facts = self.router(x), self.config
        weights, chosen = self.route(logits[:, : facts.count])
        read = x[:, None].expand(-1, chosen.shape[1], -1)
        if facts.weighted_input:
            read, weights = read * weights.to(x.dtype)[..., None], torch.ones_like(weights)
        results = torch.empty_like(read, memory_format=torch.contiguous_format)
        for expert in sorted(set(chosen.flatten().tolist())):
            rows, places = torch.nonzero(chosen == expert, as_tuple=True)
            own = read[rows, places]  # torch computes a lone row with another kernel than two
            results[rows, places] = self.each[expert](own if len(rows) > 1 else own.expand(2, -1))[: len(rows)]
        mixed = torch.zeros_like(x, dtype=torch.float32)
        for place in range(chosen.shape[1]):
            mixed = mixed + results[:, place] * weights[:, place, None]
        if self.shared is not None:
            shared = self.shared(x)
            mixed = mixed + (torch.sigmoid(logits[:, facts.count :]) * shared if facts.shared_gate else shared)
        return mixed.to(x.dtype)


def _sigmoid(logits: Tensor) -> Tensor:  # [T, E] -> [T, E]
    """Sigmoid in float32. Rows are padded to torch's vector width: torch computes a remainder with another function."""
    count = logits.shape[-1]
    whole = F.pad(logits.float(), (0, -count % VECTORS))
    return in_parts(torch.sigmoid, whole)[:, :count]


def _in_best_groups(ranks: Tensor, facts: ExpertConfig) -> Tensor:  # [T, E] -> [T, E]
    """Ranks of the experts in the chosen groups; experts of other groups get -inf."""
    if facts.groups == 1:
        return ranks
    groups = ranks.view(len(ranks), facts.groups, -1)
    best = groups.topk(facts.group_best, -1).values.sum(-1).topk(facts.chosen_groups, -1).indices
    left_out = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(1, best, value=False)
    return groups.masked_fill(left_out.unsqueeze(-1), -torch.inf).flatten(1)
