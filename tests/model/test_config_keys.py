"""Every key of config.json that is read, at an unusual value, in every family: transformers says what it changes.

The oracle is the logits of a random model that transformers builds of the same file. A key that a family's code never
reads must change nothing, and a file that transformers cannot run is refused or listed here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from test_families import Sequence
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from sametoken.checkpoint.experts import single_experts
from sametoken.checkpoint.fill import load_parameters
from sametoken.checkpoint.mapping import rules_for
from sametoken.checkpoint.quantised.collect import Item
from sametoken.errors import SametokenError
from sametoken.model.config import FAMILIES, ModelConfig
from sametoken.model.decoder import Decoder

VOCAB, LENGTH = 64, 24
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "initializer_range": 0.2,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    "num_experts": 5, "num_local_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}  # fmt: skip
ORIGINAL = "original_max_position_embeddings"
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, ORIGINAL: 16}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1 + 0.1 * i for i in range(8)],
    "long_factor": [1 + 0.8 * i for i in range(8)],
}  # fmt: skip
HALF = {key: value[:4] for key, value in LONG.items() if isinstance(value, list)}


def rope(stated: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {**stated, **more}}


def plain(**more: Any) -> dict[str, Any]:
    return rope({"rope_type": "default"}, **more)


WINDOW = {"sliding_window": 5}
TYPES = {"layer_types": ["full_attention", "sliding_attention"]}
CHANGES: list[dict[str, Any]] = [
    {},
    {"partial_rotary_factor": 0.5},
    plain(rope_theta=1e4, partial_rotary_factor=0.5),
    rope(YARN, partial_rotary_factor=0.5),
    rope({**LONG, **HALF}, partial_rotary_factor=0.5, **{ORIGINAL: 16}),
    {"rope_theta": 100.0},
    {"rope_theta": 100.0, **plain()},
    {"rope_theta": 100.0, **plain(rope_theta=50.0)},
    {"rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_scaling": {"type": "linear", "factor": 2.0}, **plain(rope_theta=50.0)},
    rope(YARN),
    rope(YARN, truncate=False),
    rope(YARN, mscale=0.7, mscale_all_dim=1.1),
    rope(YARN, attention_factor=0.8),
    rope(YARN, beta_fast=8, beta_slow=2),
    {**rope(YARN), ORIGINAL: 8},
    {**rope({key: value for key, value in YARN.items() if key != ORIGINAL}), ORIGINAL: 8},
    {**rope({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), ORIGINAL: 8},
    rope({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, ORIGINAL: 8}),
    rope(LLAMA3, **{ORIGINAL: 16}),
    {**rope(LLAMA3), ORIGINAL: 16},
    rope(LONG, **{ORIGINAL: 16}),
    {**rope(LONG), ORIGINAL: 16},
    {**rope(LONG, **{ORIGINAL: 16}), ORIGINAL: 32},
    rope(LONG, factor=3.0, **{ORIGINAL: 16}),
    rope(LONG, attention_factor=3.0, **{ORIGINAL: 16}),
    {"rms_norm_eps": 0.5},
    {"hidden_act": "gelu"},
    {"hidden_act": "gelu_pytorch_tanh"},
    {"head_dim": 32},
    {"head_dim": 8},
    {"attention_bias": True},
    {"mlp_bias": True},
    {"tie_word_embeddings": True},
    {"num_key_value_heads": 1},
    {"num_key_value_heads": None},
    WINDOW,
    {"sliding_window": None},
    {**WINDOW, "use_sliding_window": False, "max_window_layers": 0},
    {**WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    {**WINDOW, "use_sliding_window": True, "max_window_layers": 0},
    {**WINDOW, "use_sliding_window": True, **TYPES},
    {**WINDOW, "use_sliding_window": False, **TYPES},
    {**WINDOW, **TYPES},
    {"num_experts_per_tok": 4},
    {"norm_topk_prob": True},
    {"decoder_sparse_step": 2},
    {"mlp_only_layers": [0]},
    {"qkv_bias": False},
    {"swiglu_alpha": 0.5},
    {"swiglu_limit": 0.5},
]
# What transformers refuses and older files state: an absent value means the default, as it did there.
OLDER = ({"num_key_value_heads": None},)


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


def kind_of(architecture: str) -> str:
    """transformers' `model_type`."""
    return architecture.removesuffix("ForCausalLM").replace("Moe", "_moe").replace("GptOss", "gpt_oss").lower()


def theirs(stated: dict[str, Any], ids: list[int]) -> tuple[Tensor, dict[str, Tensor]] | None:
    """Logits and weights of a random model, None where transformers cannot run it."""
    try:
        config = AutoConfig.for_model(
            kind_of(stated["architectures"][0]), **copy.deepcopy(stated)
        )  # which completes dictionaries in place
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
        for parameter in model.parameters():
            if parameter.dim() == 1:  # biases of 0 and norms of 1 would hide that one is never applied
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
        return model(torch.tensor([ids])).logits[0], model.state_dict()
    except Exception:  # whatever its validators and tensors raise
        return None


def ours(stated: dict[str, Any], weights: dict[str, Tensor], ids: list[int]) -> Tensor:
    config = ModelConfig.from_hf(stated, max_seq_len=len(ids))  # so that longrope chooses as transformers does
    with torch.device("meta"):
        decoder = Decoder(config, torch.float32)
    assert config.parameters == sum(parameter.numel() for parameter in decoder.parameters())
    stored = [Item(name, tensor, Path("weights")) for name, tensor in weights.items()]
    load_parameters(decoder, single_experts(stored, config), rules_for(config), torch.float32, "cpu")
    return Sequence(decoder).extend(ids)


class Recorded(dict[str, Any]):
    """A config.json that remembers which of its keys are read."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)


# Keys of transformers' configuration classes that say nothing about what a trained model computes.
NO_EFFECT = {
    "attention_dropout", "embd_pdrop", "initializer_range", "output_router_logits", "pad_token_id", "pretraining_tp",
    "resid_pdrop", "router_aux_loss_coef", "router_jitter_noise", "use_cache",
}  # fmt: skip


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_key_of_a_configuration_class_is_read_or_has_no_effect(architecture: str) -> None:
    config = AutoConfig.for_model(kind_of(architecture))
    own = {field.name for field in fields(config)} - {field.name for field in fields(PreTrainedConfig())}
    own = {config.attribute_map.get(name, name) for name in own}
    own |= {
        "tie_word_embeddings",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    }
    stated = Recorded({**config.to_dict(), "architectures": [architecture], **WINDOW, "use_sliding_window": True})
    ModelConfig.from_hf(stated)
    assert own - stated.read - NO_EFFECT == set()
    assert NO_EFFECT.isdisjoint(stated.read)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: str(change)[:90])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_key_changes_what_it_changes_in_transformers(architecture: str, change: dict[str, Any]) -> None:
    stated = {**SHAPE, "architectures": [architecture], **change}
    ids = torch.randint(VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
    found = theirs(stated, ids)
    if found is not None:
        torch.testing.assert_close(ours(stated, found[1], ids), found[0], rtol=0, atol=1e-4)
    elif change not in OLDER:
        with pytest.raises(SametokenError):
            ModelConfig.from_hf(stated)
