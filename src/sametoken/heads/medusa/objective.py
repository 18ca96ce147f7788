"""Training objective of Medusa heads: head i guesses the token i + 2 places after its input."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sametoken.heads.kind import Head
from sametoken.heads.medusa.config import MedusaConfig
from sametoken.heads.medusa.module import MedusaHeads
from sametoken.heads.medusa.static_tree import best_tree, rank_rates
from sametoken.heads.modelopt import FROZEN, ModelOptNames
from sametoken.heads.objective import HeadObjective, refuse_other
from sametoken.learning.batch import Batch
from sametoken.learning.loss import AcceptanceMetrics, Teacher, guess_loss
from sametoken.learning.objective import STD, Start
from sametoken.learning.target import Features, OuterLayers
from sametoken.model.config import ModelConfig


class MedusaObjective(HeadObjective):
    """Loss of the guesses of all heads."""

    modelopt = ModelOptNames({"medusa_freeze_base_model": FROZEN})

    @property
    def steps(self) -> int:  # type: ignore[override]
        count: int = self.head.config.num_heads
        return count

    @classmethod
    def configure(
        cls, settings: Any, target: ModelConfig, vocabulary: int, architecture: Mapping[str, Any] | None = None
    ) -> MedusaConfig:
        return MedusaConfig(
            settings.medusa_num_heads, settings.medusa_num_layers, target.hidden_size, target.vocab_size,
            settings.medusa_own_heads,
        )  # fmt: skip

    @classmethod
    def first_weights(cls, head: Head, target_head: Tensor, generator: torch.Generator, std: float = STD) -> None:
        """Set residual blocks to zero and output layers to the target's: each head starts as the target's head."""
        assert isinstance(head, MedusaHeads)
        super().first_weights(head, target_head, generator, std)
        for each in head.each():
            for parameter in each.blocks.parameters():
                parameter.data.zero_()
            if each.head is not None:
                each.head.weight.data.copy_(target_head)

    @classmethod
    def compare(cls, head: MedusaHeads, start: Start) -> None:
        refuse_other(start, "--medusa-num-heads", head.config.num_heads, start.head.medusa_num_heads)

    @classmethod
    def best_tree(
        cls, head: MedusaHeads, outer: OuterLayers, texts: Iterable[tuple[Tensor, Tensor, int]], nodes: int
    ) -> tuple[tuple[int, ...], ...]:
        return best_tree(rank_rates(head, outer, texts), nodes)

    @classmethod
    def with_tree(cls, head: MedusaHeads, paths: tuple[tuple[int, ...], ...]) -> MedusaHeads:
        head.config = replace(head.config, choices=paths)
        return head

    def minimised(
        self, batch: Batch, features: Features, teacher: Teacher, weights: Tensor
    ) -> tuple[Tensor, AcceptanceMetrics]:
        states = self.head.states(features.last.to(self.dtype))
        if own := [head.head for head in self.head.each() if head.head is not None]:
            states = [layer.rows(state) for layer, state in zip(own, states, strict=True)]
        layers = [layer.matrix for layer in own] or [self.outer.head]
        return guess_loss(torch.stack(states), layers, teacher, weights, self.rule)
