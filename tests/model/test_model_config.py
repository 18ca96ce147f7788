"""Reading config.json: published files of every family against transformers' config classes, and every bad value."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from sametoken.errors import CheckpointError, ConfigError, SametokenError, UnsupportedModelError
from sametoken.model import layers
from sametoken.model.config import ACTIVATIONS, ModelConfig
from sametoken.model.families import FAMILIES

SHAPE = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
    "hidden_act": "silu",
}
MODEL_TYPES = {name: kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()}
MODEL_TYPES["Gemma3ForCausalLM"] = "gemma3_text"
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32}

# What published files look like, old and new spellings; keys that only a transformers default supplies are left out.
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama-2": {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096, "torch_dtype": "float16"},
    "llama-3.1": {
        "architectures": ["LlamaForCausalLM"],
        "num_key_value_heads": 8,
        "rope_theta": 500000.0,
        "rope_scaling": LLAMA3,
        "eos_token_id": [128001, 128008, 128009],
        "max_position_embeddings": 131072,
    },
    "llama-5-spelling": {
        "architectures": ["LlamaForCausalLM"],
        "rope_parameters": {**LLAMA3, "rope_theta": 500000.0},
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "llama-linear": {"architectures": ["LlamaForCausalLM"], "rope_scaling": {"type": "linear", "factor": 2.0}},
    "mistral-0.1": {"architectures": ["MistralForCausalLM"], "rope_theta": 10000.0},
    "mistral-0.2": {"architectures": ["MistralForCausalLM"], "sliding_window": None, "rope_theta": 1e6},
    "mistral-nemo": {"architectures": ["MistralForCausalLM"], "sliding_window": None, "head_dim": 128},
    "phi-3-4k": {"architectures": ["Phi3ForCausalLM"], "sliding_window": 2047, "rope_scaling": None},
    "phi-3-128k": {
        "architectures": ["Phi3ForCausalLM"],
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "rope_scaling": LONGROPE,
    },
    "phi-4-mini": {
        "architectures": ["Phi3ForCausalLM"],
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.75,
        "max_position_embeddings": 131072,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 24, "long_factor": [2.0] * 24},
    },
    "qwen-1.5": {"architectures": ["Qwen2ForCausalLM"], "rope_theta": 1e6, "use_sliding_window": False},
    "qwen-2.5": {
        "architectures": ["Qwen2ForCausalLM"],
        "num_key_value_heads": 2,
        "use_sliding_window": True,
        "sliding_window": 4096,
        "max_window_layers": 21,
        "tie_word_embeddings": True,
    },
    "qwen-2.5-yarn": {
        "architectures": ["Qwen2ForCausalLM"],
        "rope_theta": 1e6,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    },
    "qwen-3": {"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 8, "rms_norm_eps": 1e-6},
    "qwen-3-layer-types": {
        "architectures": ["Qwen3ForCausalLM"],
        "use_sliding_window": True,
        "sliding_window": 512,
        "layer_types": ["full_attention", "sliding_attention"] * 15,
        "attention_bias": True,
    },
    "phi-4": {
        "architectures": ["Phi3ForCausalLM"], "bos_token_id": 100257, "eos_token_id": 100265, "rope_theta": 250000,
        "max_position_embeddings": 16384, "original_max_position_embeddings": 16384, "num_key_value_heads": 8,
        "rope_scaling": None, "sliding_window": None, "pad_token_id": None,
    },
    "phi-4-mini-instruct": {
        "architectures": ["Phi3ForCausalLM"], "bos_token_id": 199999, "eos_token_id": 199999, "full_attn_mod": 1,
        "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False, "num_key_value_heads": 8,
        "max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 24, "long_factor": [2.0] * 24},
        "sliding_window": 262144, "tie_word_embeddings": True, "pad_token_id": None,
    },
    "gemma-2-it": {
        "architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        "bos_token_id": 2, "eos_token_id": [1, 107], "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192, "num_key_value_heads": 4, "query_pre_attn_scalar": 256,
        "sliding_window": 4096, "rope_theta": 10000.0, "torch_dtype": "bfloat16",
    },
    "gemma-3-1b-it": {
        "architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": None, "final_logit_softcapping": None,
        "eos_token_id": [1, 106], "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 512,
        "max_position_embeddings": 32768, "num_key_value_heads": 1, "rope_local_base_freq": 10000,
        "rope_scaling": None, "rope_theta": 1000000, "sliding_window_pattern": 6,
    },
    "olmo-2": {
        "architectures": ["Olmo2ForCausalLM"], "eos_token_id": 100257, "max_position_embeddings": 4096,
        "num_key_value_heads": 32, "rms_norm_eps": 1e-6, "rope_theta": 500000, "rope_scaling": None,
    },
    "olmo-3": {
        "architectures": ["Olmo3ForCausalLM"], "eos_token_id": 100257, "max_position_embeddings": 65536,
        "rope_scaling": {
            "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
            "original_max_position_embeddings": 8192, "rope_type": "yarn",
        },
        "rope_theta": 500000, "sliding_window": 4096,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 6,
    },
    "granite-3.3": {
        "architectures": ["GraniteForCausalLM"], "attention_multiplier": 0.0078125, "embedding_multiplier": 12.0,
        "logits_scaling": 16.0, "residual_multiplier": 0.22, "bos_token_id": 0, "eos_token_id": 0,
        "max_position_embeddings": 131072, "mlp_bias": False, "num_key_value_heads": 8, "rope_theta": 10000000.0,
        "tie_word_embeddings": True,
    },
    "smollm-3": {
        "architectures": ["SmolLM3ForCausalLM"], "eos_token_id": 128012, "max_position_embeddings": 65536,
        "max_window_layers": 28, "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0, 1] * 6,
        "num_key_value_heads": 4, "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None,
        "use_sliding_window": False,
    },
    "glm-4-9b-chat-hf": {
        "architectures": ["GlmForCausalLM"], "attention_bias": True, "eos_token_id": [151329, 151336, 151338],
        "head_dim": 128, "num_key_value_heads": 2, "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-07,
        "max_position_embeddings": 131072, "rope_theta": 10000.0,
    },
    "glm-4-0414": {
        "architectures": ["Glm4ForCausalLM"], "attention_bias": False, "eos_token_id": [151329, 151336, 151338],
        "head_dim": 128, "num_key_value_heads": 2, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05,
        "max_position_embeddings": 32768,
    },
}  # fmt: skip


def published(name: str) -> dict[str, Any]:
    # A copy all the way down: transformers completes the rotary dictionary that it is given in place.
    return copy.deepcopy({**SHAPE, **PUBLISHED[name]})


def transformers_config(stated: dict[str, Any]) -> PreTrainedConfig:
    return AutoConfig.for_model(MODEL_TYPES[stated["architectures"][0]], **stated)


def windows(config: PreTrainedConfig) -> tuple[int | None, ...]:
    """Per layer, as the modelling code of transformers chooses its mask."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in types)


@pytest.mark.parametrize("name", PUBLISHED)
def test_facts_equal_transformers(name: str) -> None:
    ours, theirs = ModelConfig.from_hf(published(name)), transformers_config(published(name))
    heads = theirs.num_attention_heads
    eos = theirs.eos_token_id
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // heads)
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.max_position == theirs.max_position_embeddings
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.sliding_windows == windows(theirs)
    assert ours.eos_token_ids == tuple(eos if isinstance(eos, list) else [] if eos is None else [eos])
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.dtype == str(theirs.dtype or "float32").removeprefix("torch.")
    assert ours.qkv_bias == (ours.family == "qwen2" or getattr(theirs, "attention_bias", False))
    assert ours.out_bias == (ours.family[:3] != "glm" and getattr(theirs, "attention_bias", False))
    assert ours.mlp_bias == getattr(theirs, "mlp_bias", False)


@pytest.mark.parametrize("name", PUBLISHED)
def test_rope_equals_transformers(name: str) -> None:
    ours, theirs = ModelConfig.from_hf(published(name)), transformers_config(published(name))
    rope = theirs.rope_parameters.get("full_attention", theirs.rope_parameters)
    assert ours.rope.kind == rope["rope_type"]
    assert ours.rope.theta == rope["rope_theta"]
    assert ours.rope.dim == int(ours.head_dim * (rope.get("partial_rotary_factor") or 1))
    assert list(ours.rope.long_factor) == rope.get("long_factor", [])
    if "original_max_position_embeddings" in rope:
        assert ours.rope.original_max_position == rope["original_max_position_embeddings"]
    if "factor" in rope:
        assert ours.rope.factor == rope["factor"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_file_saved_again_by_transformers_reads_the_same(name: str) -> None:
    again = transformers_config(published(name)).to_diff_dict()
    again["architectures"] = PUBLISHED[name]["architectures"]
    assert ModelConfig.from_hf(again) == ModelConfig.from_hf(published(name))


@pytest.mark.parametrize("early", ["su", "yarn"])
def test_early_phi3_names_of_longrope(early: str) -> None:
    """transformers 5 renames these too late to load them; the files are out there all the same."""
    renamed = {**published("phi-3-128k"), "rope_scaling": {**LONGROPE, "type": early}}
    assert ModelConfig.from_hf(renamed) == ModelConfig.from_hf(published("phi-3-128k"))


def test_the_context_limit_leaves_the_rotary_facts_alone() -> None:
    free, limited = (ModelConfig.from_hf(published("phi-3-128k"), max_seq_len=n) for n in (None, 2048))
    assert (free.max_position, limited.max_position) == (131072, 2048)
    assert free.rope == limited.rope
    with pytest.raises(ConfigError, match="max_seq_len is 0"):
        ModelConfig.from_hf(published("phi-3-128k"), max_seq_len=0)


BAD: list[tuple[dict[str, Any], type[SametokenError], str]] = [
    (
        {"architectures": ["GPT2LMHeadModel"]},
        UnsupportedModelError,
        "GPT2LMHeadModel.*LlamaForCausalLM.*Qwen3ForCausalLM",
    ),
    ({"architectures": None}, CheckpointError, "'architectures'"),
    ({"architectures": []}, CheckpointError, "'architectures'"),
    ({"quantization_config": {"quant_method": "awq"}}, UnsupportedModelError, "quantization_config"),
    ({"hidden_act": "relu2"}, UnsupportedModelError, "relu2.*silu"),
    ({"torch_dtype": "float8_e4m3fn"}, UnsupportedModelError, "float8_e4m3fn.*bfloat16"),
    ({"rope_scaling": {"type": "mrope", "factor": 2.0}}, UnsupportedModelError, "mrope.*longrope"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, UnsupportedModelError, "per layer type"),
    ({"rope_scaling": {"type": "linear"}}, CheckpointError, "'factor'.*rope|rope.*'factor'"),
    ({"rope_scaling": {**LLAMA3, "low_freq_factor": "1"}}, CheckpointError, "'low_freq_factor'"),
    ({"rope_scaling": [8]}, CheckpointError, "'rope_scaling'"),
    ({"rope_theta": -1}, CheckpointError, "'rope_theta'"),
    ({"rope_theta": float("nan")}, CheckpointError, "'rope_theta'"),
    ({"rope_scaling": {"type": ["linear"], "factor": 2.0}}, UnsupportedModelError, "rotary kind .'linear'."),
    ({"num_hidden_layers": 10**9}, CheckpointError, "1000000000 for 'num_hidden_layers', expected at most 1024"),
    ({"max_position_embeddings": 10**15}, CheckpointError, "'max_position_embeddings', expected at most"),
    ({"hidden_size": 10**400}, CheckpointError, r"10+\.\.\.0+ for 'hidden_size'"),
    ({"rope_theta": 10**400}, CheckpointError, "'rope_theta'"),
    ({"head_dim": 63}, CheckpointError, "63 of the 63"),
    ({"vocab_size": None}, CheckpointError, "'vocab_size'"),
    ({"hidden_size": "2048"}, CheckpointError, "'2048' for 'hidden_size'"),
    ({"num_hidden_layers": 2.5}, CheckpointError, "2.5 for 'num_hidden_layers'"),
    ({"num_hidden_layers": 0}, CheckpointError, "0 for 'num_hidden_layers'"),
    ({"num_attention_heads": True}, CheckpointError, "'num_attention_heads'"),
    ({"num_key_value_heads": 5}, CheckpointError, "5 'num_key_value_heads'"),
    ({"rms_norm_eps": 0}, CheckpointError, "'rms_norm_eps'"),
    ({"tie_word_embeddings": "yes"}, CheckpointError, "'tie_word_embeddings'"),
    ({"eos_token_id": "</s>"}, CheckpointError, "'eos_token_id'"),
]


@pytest.mark.parametrize(("change", "error", "words"), BAD, ids=[str(change)[:50] for change, _, _ in BAD])
def test_bad_values_are_named(change: dict[str, Any], error: type[SametokenError], words: str) -> None:
    with pytest.raises(error) as caught:
        ModelConfig.from_hf({**published("llama-2"), **change})
    assert re.search(words, str(caught.value))


@pytest.mark.parametrize(
    ("name", "change", "error", "words"),
    [
        ("phi-3-128k", {"rope_scaling": {**LONGROPE, "long_factor": [1.0] * 31}}, CheckpointError, "'long_factor'"),
        ("phi-3-128k", {"rope_scaling": {**LONGROPE, "short_factor": [0] * 32}}, CheckpointError, "'short_factor'"),
        ("phi-3-128k", {"rope_scaling": LLAMA3}, UnsupportedModelError, "llama3.*phi3"),
        ("qwen-2.5", {"layer_types": ["full_attention"]}, CheckpointError, "'layer_types'"),
        ("phi-4-mini", {"partial_rotary_factor": 1.5}, CheckpointError, "96 of the 64"),
        ("phi-4-mini", {"partial_rotary_factor": 1e300}, CheckpointError, "'partial_rotary_factor'"),
        ("phi-3-128k", {"rope_scaling": {**LONGROPE, "short_factor": [float("nan")] * 32}}, CheckpointError, "'short_"),
        ("qwen-2.5", {"layer_types": [["full_attention"]] * 30}, CheckpointError, "one name per layer"),
        ("qwen-2.5", {"layer_types": ["linear_attention"] * 30}, UnsupportedModelError, "linear_attention"),
        ("qwen-2.5", {"max_window_layers": "21"}, CheckpointError, "'max_window_layers'"),
        ("mistral-0.1", {"sliding_window": "4096"}, CheckpointError, "'sliding_window'"),
    ],
)
def test_bad_values_of_a_family_are_named(
    name: str, change: dict[str, Any], error: type[SametokenError], words: str
) -> None:
    with pytest.raises(error) as caught:
        ModelConfig.from_hf({**published(name), **change})
    assert re.search(words, str(caught.value))


def test_the_text_part_of_gemma_3_as_published_leaves_sizes_out() -> None:
    stated = {
        "architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "image_token_index": 262144,
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        },
        "vision_config": {"hidden_size": 1152}, "torch_dtype": "bfloat16",
    }  # fmt: skip
    found = ModelConfig.from_hf(stated)
    assert (found.vocab_size, found.num_heads, found.num_kv_heads, found.head_dim) == (262208, 8, 4, 256)
    assert found.tie_word_embeddings
    assert found.eos_token_ids == (1, 106)
    assert found.dtype == "bfloat16"
    assert found.sliding_windows[:7] == (1024,) * 5 + (None, 1024)
    local, full = found.ropes[0], found.ropes[5]
    assert local is not None
    assert full == found.rope
    assert (local.kind, local.theta, full.kind, full.theta, full.factor) == ("default", 1e4, "linear", 1e6, 8.0)


def test_qwen_3_vl_as_published() -> None:
    stated = {
        "architectures": ["Qwen3VLForConditionalGeneration"], "tie_word_embeddings": True, "image_token_id": 151655,
        "text_config": {
            "attention_bias": False, "bos_token_id": 151643, "dtype": "bfloat16", "eos_token_id": 151645,
            "head_dim": 128, "hidden_act": "silu", "hidden_size": 2560, "intermediate_size": 9728,
            "max_position_embeddings": 262144, "model_type": "qwen3_vl_text", "num_attention_heads": 32,
            "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
            "rope_theta": 5000000, "tie_word_embeddings": True, "vocab_size": 151936,
        },
        "vision_config": {"depth": 24},
    }  # fmt: skip
    found = ModelConfig.from_hf(stated)
    assert (found.eos_token_ids, found.bos_token_id, found.dtype) == ((151645,), 151643, "bfloat16")
    assert (found.rope.kind, found.rope.theta, found.rope.dim) == ("default", 5e6, 128)
    assert found.tie_word_embeddings
    assert found.qk_norm


@pytest.mark.parametrize("key", [key for key in SHAPE if key != "hidden_act"])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_missing_shape_is_named_not_guessed(architecture: str, key: str) -> None:
    stated = {name: value for name, value in SHAPE.items() if name != key}
    inner = FAMILIES[architecture].inner
    whole = {"architectures": [architecture], **(stated if inner is None else {"text_config": stated})}
    if key in (inner or {}):
        assert ModelConfig.from_hf(whole)
        return
    with pytest.raises(CheckpointError, match=f"nothing for '{key}'"):
        ModelConfig.from_hf(whole)


def test_every_activation_that_is_read_can_be_computed() -> None:
    assert set(ACTIVATIONS) == set(layers.ACTIVATIONS)
