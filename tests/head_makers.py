"""Random heads of every kind for a tiny target."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from sametoken.heads.eagle.config import EagleConfig
from sametoken.heads.eagle.module import EagleHead
from sametoken.heads.eagle.objective import EagleObjective
from sametoken.model.config import ModelConfig

TARGET = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "tie_word_embeddings": True, "model_type": "llama", "dtype": "float32",
}  # fmt: skip

FLAGS: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "eagle3-residual": {"norm_before_residual": True},
    "eagle3-before-fc": {"norm_before_fc": True},
    "eagle3.1": {"fc_norm": True, "norm_output": True},
    "eagle3-layers": {"num_layers": 2},
    "eagle3-window": {"window": 3},
    "eagle3-own-embed": {"own_embed": True},
    "eagle1": {"version": 1},
    "eagle1-layers": {"version": 1, "num_layers": 2, "fc_bias": True, "input_norm": True, "last_norm": True},
}


def target_config() -> ModelConfig:
    return ModelConfig.from_hf(TARGET)


def eagle_config(num_layers: int = 1, window: int | None = None, version: int = 3, **flags: Any) -> EagleConfig:
    target = target_config()
    layers = replace(target, num_layers=num_layers, sliding_windows=(window,) * num_layers)
    if version == 1:
        flags = {"own_head": False, "last_norm": False, **flags}
    taps = (1, 3, 4) if version == 3 else ()
    return EagleConfig(layers, version, taps, target.hidden_size, 32, **flags)


def random_head(config: EagleConfig, seed: int = 0) -> EagleHead:
    """Weights wide enough that a wrong detail shows, norms and biases random too."""
    head = EagleHead(config, torch.float32)
    generator = torch.Generator().manual_seed(seed)
    EagleObjective.first_weights(head, torch.randn(32, 16, generator=generator), generator)
    for parameter in head.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return head
