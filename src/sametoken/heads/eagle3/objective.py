"""Training objective of EAGLE-3 heads, which read several blocks of the target and may have a reduced vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sametoken.checkpoint.paths import read_keys
from sametoken.heads.eagle.architecture import blocks_of, check_keys, fixed_by, flags_of
from sametoken.heads.eagle.config import EagleConfig
from sametoken.heads.eagle.modelopt import EagleModelOptNames
from sametoken.heads.eagle.module import EagleHead
from sametoken.heads.eagle.objective import EagleObjective
from sametoken.heads.objective import refuse_other
from sametoken.heads.taps import default_taps, parse_layers
from sametoken.learning.batch import Batch
from sametoken.learning.objective import Start
from sametoken.learning.target import Features
from sametoken.model.config import ModelConfig

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


class Eagle3Objective(EagleObjective):
    """Loss of the guesses of an EAGLE-3 head."""

    STEPS = 7  # number in SafeAILab/EAGLE
    modelopt = EagleModelOptNames(taps=True)

    @property
    def taps(self) -> tuple[int, ...]:  # type: ignore[override]
        layers: tuple[int, ...] = self.head.config.taps
        return layers

    @classmethod
    def configure(
        cls, settings: Any, target: ModelConfig, vocabulary: int, architecture: Mapping[str, Any] | None = None
    ) -> EagleConfig:
        given = read_keys("--eagle-config", settings.eagle_config) if architecture is None else architecture
        # Token embeddings are always normed.
        fixed = {"use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True}
        check_keys(given, fixed_by(target, vocabulary) | fixed, settings.eagle_config)
        listed = given.get("eagle_aux_hidden_state_layer_ids")
        taps = chosen_taps(",".join(map(str, listed)) if listed else settings.taps, target)
        flags = {name: bool(getattr(settings, name)) for name in FLAGS} | flags_of(given)
        flags.pop("input_norm", None)
        blocks = blocks_of(settings, target, given)
        return EagleConfig(blocks, 3, taps, target.hidden_size, vocabulary, **{"last_norm": True, **flags})

    @classmethod
    def restrict(cls, head: EagleHead, draft_ids: Tensor | None) -> None:
        if draft_ids is not None:
            head.d2t.copy_(draft_ids - torch.arange(len(draft_ids), device=draft_ids.device))

    @classmethod
    def compare(cls, head: EagleHead, start: Start) -> None:
        own, asked = head.config.taps, start.head.taps
        refuse_other(start, "--taps", own, own if asked is None else chosen_taps(asked, start.outer.config))
        super().compare(head, start)

    def read_states(self, features: Features, batch: Batch) -> Tensor:
        return features.taps


def chosen_taps(text: str | None, target: ModelConfig) -> tuple[int, ...]:
    """Blocks of the target from the option --taps; None for the default ones.

    Raises:
        ConfigError: the target has no such blocks.
    """
    return default_taps(target.num_layers) if text is None else parse_layers(text, target.num_layers)
