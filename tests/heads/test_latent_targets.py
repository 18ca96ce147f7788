"""What a new head or draft model of a target with latent attention looks like: a plain block with few keys."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config, LlamaConfig, PreTrainedConfig

from sametoken.heads.draft_model.objective import new_draft
from sametoken.heads.eagle.architecture import blocks_of
from sametoken.model.config import ModelConfig

SETTINGS = SimpleNamespace(eagle_num_layers=1, draft_window=None, init_from=None, draft_config=None)


def target(config: PreTrainedConfig) -> ModelConfig:
    name = type(config).__name__.removesuffix("Config")
    return ModelConfig.from_hf({**config.to_dict(), "architectures": [f"{name}ForCausalLM"]})


@pytest.mark.parametrize(
    ("config", "heads"),
    [
        (DeepseekV3Config(), (56, 8, 128)),
        (DeepseekV2Config(hidden_size=2048, num_attention_heads=16, num_experts_per_tok=6), (16, 8, 128)),
        (DeepseekV2Config(hidden_size=60, num_attention_heads=4, v_head_dim=9, num_experts_per_tok=6), (6, 2, 10)),
        (LlamaConfig(num_key_value_heads=16), (32, 16, 128)),
    ],
)
def test_heads_of_a_new_eagle_head(config: PreTrainedConfig, heads: tuple[int, int, int]) -> None:
    layers = blocks_of(SETTINGS, target(config), {})
    assert (layers.num_heads, layers.num_kv_heads, layers.head_dim, layers.rope.dim) == (*heads, heads[2])
    stated = blocks_of(SETTINGS, target(config), {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 6})
    assert (stated.num_heads, stated.num_kv_heads, stated.head_dim, stated.rope.dim) == (4, 4, 6, 6)


def test_heads_of_a_new_draft_model() -> None:
    sizes = {"hidden_size": 256, "v_head_dim": 16, "num_attention_heads": 64, "num_key_value_heads": 64}
    config = target(DeepseekV3Config(**sizes, vocab_size=32, max_position_embeddings=64, num_hidden_layers=2))
    draft = new_draft(SETTINGS, config, Path(), torch.device("cpu"), 0).decoder.config
    assert (draft.num_heads, draft.num_kv_heads, draft.head_dim, draft.latent) == (8, 4, 16, None)
