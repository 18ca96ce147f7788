"""The training objective of next-feature heads: unrolled on their own states, scored by the target's output layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sametoken.heads.objective import HeadObjective
from sametoken.learning.batch import Batch
from sametoken.learning.loss import AcceptanceMetrics, Teacher, guess_loss
from sametoken.learning.target import Features
from sametoken.model.config import ModelConfig
from sametoken_next_feature.head import NextFeatureConfig


class NextFeatureObjective(HeadObjective):
    """The loss of the guesses of a next-feature head."""

    @property
    def steps(self) -> int:
        return self.settings.next_feature_steps

    @classmethod
    def configure(
        cls, settings: Any, target: ModelConfig, vocabulary: int, architecture: Mapping[str, Any] | None = None
    ) -> NextFeatureConfig:
        inner = settings.next_feature_inner_size or 2 * target.hidden_size
        return NextFeatureConfig(target.hidden_size, target.vocab_size, inner)

    def minimised(
        self, batch: Batch, features: Features, teacher: Teacher, weights: Tensor
    ) -> tuple[Tensor, AcceptanceMetrics]:
        state, states = features.last.to(self.dtype), []
        for step in range(self.steps):  # slot i reads its state and token i + 1 + step, and guesses the one after
            state = self.head(F.embedding(batch.ahead(1 + step), self.outer.vectors).to(self.dtype), state)
            states.append(state)
        return guess_loss(torch.stack(states), [self.outer.head], teacher, weights, self.rule)
