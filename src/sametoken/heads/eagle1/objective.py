"""Training objective of EAGLE-1 heads, which read the target's last states and learn to predict the next ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sametoken.checkpoint.paths import read_keys
from sametoken.heads.eagle.architecture import blocks_of, check_keys, fixed_by, flags_of
from sametoken.heads.eagle.config import EagleConfig
from sametoken.heads.eagle.modelopt import EagleModelOptNames
from sametoken.heads.eagle.objective import EagleObjective
from sametoken.learning.batch import Batch
from sametoken.learning.loss import Teacher, feature_loss
from sametoken.learning.target import Features
from sametoken.learning.unroll import Unrolled
from sametoken.model.config import ModelConfig
from sametoken.speculation.noise import uniform


class Eagle1Objective(EagleObjective):
    """Loss of the guesses of an EAGLE-1 head and of the hidden states that it predicts."""

    STEPS = 1
    modelopt = EagleModelOptNames(taps=False)

    @property
    def draws(self) -> bool:  # type: ignore[override]
        return bool(self.settings.noise)

    @classmethod
    def configure(
        cls, settings: Any, target: ModelConfig, vocabulary: int, architecture: Mapping[str, Any] | None = None
    ) -> EagleConfig:
        given = read_keys("--eagle-config", settings.eagle_config) if architecture is None else architecture
        check_keys(given, fixed_by(target, vocabulary) | {"use_aux_hidden_state": False}, settings.eagle_config)
        flags = {"last_norm": False, "fc_bias": settings.fc_bias, "own_head": False} | flags_of(given)
        return EagleConfig(blocks_of(settings, target, given), 1, (), target.hidden_size, vocabulary, **flags)

    def read_states(self, features: Features, batch: Batch) -> Tensor:
        if batch.seeds is None or not self.draws:
            return features.last
        return with_noise(features.last, batch, self.settings.noise)

    def combined(self, loss: Tensor, unrolled: Unrolled, teacher: Teacher, weights: Tensor) -> Tensor:
        distance = feature_loss(unrolled.recycled, teacher.last, weights)
        total: Tensor = self.settings.guess_weight * loss + self.settings.feature_weight * distance
        return total


def with_noise(states: Tensor, batch: Batch, width: float) -> Tensor:
    """Add uniform noise to states [N, Ht], less in documents of over 512 tokens, as SafeAILab/EAGLE trains EAGLE-1.

    (SafeAILab/EAGLE adds more to shorter documents, which for a few dozen tokens exceeds the states themselves.) The
    noise of a token depends only on its document's seed and its place.
    """
    assert batch.seeds is not None
    channels = torch.arange(states.shape[1], device=states.device)
    random = uniform(batch.seeds.to(states.device)[batch.documents], batch.positions, channels)
    scale = torch.tensor([width * 512 / max(length, 512) for length in batch.lengths], device=states.device)
    return states + ((random - 0.5) * scale[batch.documents].unsqueeze(1)).to(states.dtype)
