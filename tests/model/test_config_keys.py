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
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from sametoken.checkpoint.experts import single_experts
from sametoken.checkpoint.fill import load_parameters
from sametoken.checkpoint.mapping import rules_for
from sametoken.checkpoint.quantised.collect import Item
from sametoken.errors import SametokenError
from sametoken.model import families
from sametoken.model.config import ModelConfig
from sametoken.model.decoder import Decoder
from tiny_models import LLAMA4_VISION, QWEN_VISION, SIGLIP, UNKNOWN

VOCAB, LENGTH = 64, 24
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "initializer_range": 0.2,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    "num_experts": 5, "num_local_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48, "n_routed_experts": 6, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "kv_lora_rank": 24, "q_lora_rank": 20, "qk_rope_head_dim": 16, "qk_nope_head_dim": 12,
    "v_head_dim": 20, "intermediate_size_mlp": 80, "interleave_moe_layer_step": 2, "attention_chunk_size": 7,
    "floor_scale": 3,
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
    {"hidden_activation": "silu"},
    {"query_pre_attn_scalar": 4},
    {"final_logit_softcapping": 2.0},
    {"final_logit_softcapping": None},
    {"attn_logit_softcapping": 0.5},
    {"attn_logit_softcapping": None},
    {"use_bidirectional_attention": True},
    {**WINDOW, "sliding_window_pattern": 2},
    {**WINDOW, "rope_local_base_freq": 50.0, "rope_theta": 30.0},
    {**WINDOW, **TYPES, "rope_local_base_freq": 50.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"embedding_multiplier": 3.0},
    {"attention_multiplier": 0.02},
    {"residual_multiplier": 0.3},
    {"logits_scaling": 5.0},
    {"no_rope_layers": [0, 1]},
    {"no_rope_layers": [0, 0], **WINDOW, "use_sliding_window": True},
    {"no_rope_layer_interval": 1},
    {"no_rope_layer_interval": 1, **WINDOW, "use_sliding_window": True},
    {"use_qk_norm": True},
    {"num_experts": 6, "num_local_experts": 6, "n_group": 2, "topk_group": 1},
    {"num_experts": 6, "num_local_experts": 6, "n_group": 3, "topk_group": 2, "norm_topk_prob": False},
    {"n_group": 5},
    {"n_group": 6},
    {"routed_scaling_factor": 2.5},
    {"first_k_dense_replace": 0},
    {"first_k_dense_replace": 9},
    {"n_shared_experts": 3},
    {"q_lora_rank": None},
    {"rope_interleave": False},
    {"qk_nope_head_dim": 32},
    {"v_head_dim": 8},
    {"kv_lora_rank": 48},
    {"qk_rope_head_dim": 8},
    {"num_experts": 6, "num_local_experts": 6, "n_group": 3, "topk_group": 2, "topk_method": "group_limited_greedy"},
    {"rope_scaling": {"rope_type": "default", "mrope_section": [3, 3, 2], "mrope_interleaved": True}},
]
LLAMA4: list[dict[str, Any]] = [
    {"no_rope_layers": [1, 0], "attn_temperature_tuning": False},
    {"no_rope_layers": [1, 0], "floor_scale": 9, "attn_scale": 0.7},
    {"no_rope_layers": []},
    {"use_qk_norm": False},
    {"attention_chunk_size": 11, "layer_types": ["full_attention", "chunked_attention"]},
    {"attention_chunk_size": None},
    {"layer_types": ["chunked_attention", "sliding_attention"]},
    {"moe_layers": [1]},
    {"moe_layers": []},
    {"moe_layers": [0, 5], "interleave_moe_layer_step": 2},
    {"interleave_moe_layer_step": 1},
    {"interleave_moe_layer_step": 3},
    {"intermediate_size_mlp": 112},
    {"num_experts_per_tok": 1},
]
LAYERED = {**WINDOW, **TYPES, "rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_theta": 50.0}}}
NO_LAYERS = {**WINDOW, **TYPES, "rope_parameters": {"full_attention": None, "sliding_attention": None}}
FAMILIES = {name: family for name, family in families.FAMILIES.items() if name not in UNKNOWN}
LAYERED_FAMILIES = [name for name, family in FAMILIES.items() if family.defaults.local_theta is not None]
# What transformers refuses and older files state: an absent value means the default, as it did there.
OLDER = ({"num_key_value_heads": None},)
# What transformers runs and is refused here.
REFUSED = {
    "Gemma": {"use_bidirectional_attention"},
    "DeepseekV2": {"norm_topk_prob", "mlp_bias"},
    "DeepseekV3": {"topk_method"},
}
# What a family's code overwrites.
OVERWRITTEN = {
    "DeepseekV2ForCausalLM": {"head_dim"},
    "Llama4ForConditionalGeneration": {"tie_word_embeddings"},  # of the whole; that of the text part counts
}
MODEL_TYPES = {
    name: kind
    for table in (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    for kind, name in table.items()
} | {"Gemma3ForConditionalGeneration": "gemma3", "Gemma3ForCausalLM": "gemma3_text"}
VISION = {
    "Gemma3ForConditionalGeneration": SIGLIP, "Llama4ForConditionalGeneration": LLAMA4_VISION,
    "Qwen3VLForConditionalGeneration": QWEN_VISION,
}  # fmt: skip


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


def shape_of(architecture: str) -> dict[str, Any]:
    """The common sizes; DeepSeek has a key for every query."""
    return {**SHAPE, "num_key_value_heads": 4} if architecture.startswith("Deepseek") else SHAPE


def nested(architecture: str, stated: dict[str, Any]) -> dict[str, Any]:
    """The same file of a model that also reads images, whose text part is one of its values."""
    if architecture not in VISION:
        return {**stated, "architectures": [architecture]}
    whole = {key: stated[key] for key in ("tie_word_embeddings", "eos_token_id", "bos_token_id") if key in stated}
    return {"architectures": [architecture], "text_config": stated, "vision_config": VISION[architecture], **whole}


def theirs(stated: dict[str, Any], ids: list[int]) -> tuple[Tensor, dict[str, Tensor]] | None:
    """Logits and weights of a random model, None where transformers cannot run it."""
    try:
        architecture = stated["architectures"][0]
        config = AutoConfig.for_model(
            MODEL_TYPES[architecture], **copy.deepcopy(stated)
        )  # which completes dictionaries in place
        torch.manual_seed(0)
        kind = AutoModelForImageTextToText if architecture in VISION else AutoModelForCausalLM
        model = kind.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
        for parameter in model.parameters():
            if parameter.dim() == 1:  # biases of 0 and norms of 1 would hide that one is never applied
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.2)
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


# Keys of transformers' configuration classes that say nothing about what a trained model computes. The second half are
# those of every class: how transformers is called, what it puts out, and names of the classes of a classifier.
NO_EFFECT = {
    "attention_dropout", "embd_pdrop", "initializer_range", "output_router_logits", "pad_token_id", "pretraining_tp",
    "resid_pdrop", "router_aux_loss_coef", "router_jitter_noise", "use_cache",
    "chunk_size_feed_forward", "id2label", "label2id", "output_attentions", "output_hidden_states",
    "problem_type", "return_dict", "transformers_version",
}  # fmt: skip
WHOLE = {"architectures", "is_encoder_decoder", "tie_word_embeddings"}  # which count where they are stated of the whole
# Of a model that reads images: how they are read, and the tokens that stand for them, which no prompt here has.
IMAGES = {
    "vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index", "image_token_id",
    "video_token_id", "vision_start_token_id", "vision_end_token_id",
}  # fmt: skip


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_key_of_a_configuration_class_is_read_or_has_no_effect(architecture: str) -> None:
    config = AutoConfig.for_model(MODEL_TYPES[architecture])
    levels = [config] if architecture not in VISION else [config, config.text_config]
    # So that what they decide about is read, and of sizes that the class leaves open.
    used = {**WINDOW, "use_sliding_window": True, "no_rope_layers": None, "num_experts_per_tok": 2}
    used |= {} if hasattr(levels[-1], "head_dim") else {"head_dim": 128}
    used |= {"topk_method": "group_limited_greedy"} if hasattr(levels[-1], "topk_method") else {}
    inner = Recorded({**levels[-1].to_dict(), **used})
    outer = inner if len(levels) == 1 else Recorded({**config.to_dict(), "text_config": inner})
    outer["architectures"] = [architecture]
    ModelConfig.from_hf(outer)
    for level, read in zip(levels, (outer, inner), strict=False):
        own = {level.attribute_map.get(field.name, field.name) for field in fields(level)}
        other = set() if len(levels) == 1 else IMAGES if read is outer else WHOLE
        assert own - read.read - NO_EFFECT - other - OVERWRITTEN.get(architecture, set()) == set()
        assert NO_EFFECT.isdisjoint(read.read)


@pytest.mark.parametrize("architecture", sorted(FAMILIES.keys() - LAYERED_FAMILIES))
def test_rotations_of_layer_types_are_refused_where_a_family_has_one(architecture: str) -> None:
    with pytest.raises(SametokenError, match="'rope_parameters' of config\\.json differs per layer type"):
        ModelConfig.from_hf(nested(architecture, {**SHAPE, **LAYERED}))


@pytest.mark.cover
@pytest.mark.parametrize(
    ("architecture", "change"),
    [
        *((name, change) for name in FAMILIES for change in CHANGES),
        *((name, change) for name in FAMILIES if name.startswith("Llama4") for change in LLAMA4),
        *((name, change) for name in LAYERED_FAMILIES for change in (LAYERED, NO_LAYERS)),
    ],
    ids=lambda value: str(value)[:90],
)
def test_a_key_changes_what_it_changes_in_transformers(architecture: str, change: dict[str, Any]) -> None:
    stated = nested(architecture, {**shape_of(architecture), **change})
    ids = torch.randint(VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
    refused = any(
        architecture.startswith(name) and keys & {key for key, value in change.items() if value}
        for name, keys in REFUSED.items()
    )
    found = None if refused else theirs(stated, ids)
    if found is not None:
        torch.testing.assert_close(ours(stated, found[1], ids), found[0], rtol=0, atol=1e-4)
    elif change not in OLDER:
        with pytest.raises(SametokenError):
            ModelConfig.from_hf(stated)
