"""Families of decoders as data: values of absent keys, and differences from a plain decoder.

Defaults are those of transformers' config classes, so a file without a key means the same as in transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from sametoken.errors import UnsupportedModelError
from sametoken.model.expert_families import EXPERT_FAMILIES
from sametoken.model.family import Facts, Family, KnownFacts, biases, every, further_layers, rotated_layers
from sametoken.model.keys import Keys
from sametoken.model.rope_config import Defaults, RopeConfig, read_local_rope
from sametoken.model.window_config import FULL, SLIDING, layer_types, one_window, qwen_windows, typed_windows

GLM_END_IDS = (151329, 151336, 151338)


def _llama(keys: Keys, plain: KnownFacts) -> Facts:
    return {**biases(keys), "mlp_bias": keys.flag("mlp_bias", False)}


def _mistral(keys: Keys, plain: KnownFacts) -> Facts:
    return {"sliding_windows": one_window(keys, plain.num_layers, absent=4096)}


def _phi3(keys: Keys, plain: KnownFacts) -> Facts:
    return {"sliding_windows": one_window(keys, plain.num_layers, absent=None)}


def _qwen2(keys: Keys, plain: KnownFacts) -> Facts:
    return {"qkv_bias": True, "sliding_windows": qwen_windows(keys, plain.num_layers)}


def _mimo(keys: Keys, plain: KnownFacts) -> Facts:
    return {**_qwen2(keys, plain), "further_layers": further_layers(keys, 0)}


def _qwen3(keys: Keys, plain: KnownFacts) -> Facts:
    return {**biases(keys), "qk_norm": True, "sliding_windows": qwen_windows(keys, plain.num_layers)}


def _qwen3_vl(keys: Keys, plain: KnownFacts) -> Facts:
    # RoPE in sections by time, height and width (`mrope_section`) is plain RoPE for text alone.
    return {**biases(keys), "qk_norm": True}


def _gemma(keys: Keys, plain: KnownFacts, caps: tuple[float | None, float | None]) -> Facts:
    """Facts that Gemma 2 and 3 have in common; `caps`: of logits and of attention scores in a file without them."""
    if keys.flag("use_bidirectional_attention", False):
        raise UnsupportedModelError(
            "config.json has 'use_bidirectional_attention' true (an encoder, as EmbeddingGemma), which is not "
            "supported; use a Gemma that generates text"
        )
    names = "final_logit_softcapping", "attn_logit_softcapping"
    final, attention = (keys.optional_number(name, cap) for name, cap in zip(names, caps, strict=True))
    return {
        **biases(keys), "norm_shift": 1.0, "norms": ("before", "after"), "embed_scale": math.sqrt(plain.hidden_size),
        "attention_scale": keys.number("query_pre_attn_scalar", 256) ** -0.5, "attention_cap": attention,
        "logits_cap": final,
    }  # fmt: skip


def _gemma2(keys: Keys, plain: KnownFacts) -> Facts:
    return {**_gemma(keys, plain, (30.0, 50.0)), "sliding_windows": every(keys, plain, 2, 4096)[1]}


def _gemma3(keys: Keys, plain: KnownFacts) -> Facts:
    types, windows = every(keys, plain, keys.integer("sliding_window_pattern", 6), 4096)
    # Its code reads a cap of attention scores and does not apply it.
    return {
        **_gemma(keys, plain, (None, None)), "attention_cap": None, "qk_norm": True, "sliding_windows": windows,
        "layer_ropes": _two_ropes(keys, plain, types, GEMMA3),
    }  # fmt: skip


def _gemma3_vision(keys: Keys, plain: KnownFacts) -> Facts:
    return {**_gemma3(keys, plain), "logits_cap": None}  # not applied outside the decoder


def _two_ropes(keys: Keys, plain: KnownFacts, types: list[str], defaults: Defaults) -> tuple[RopeConfig, ...]:
    """RoPE of each layer in a family whose windowed layers have a different RoPE."""
    local = read_local_rope(keys, plain.head_dim, defaults)
    return tuple(local if kind == SLIDING else plain.rope for kind in types)


def _olmo2(keys: Keys, plain: KnownFacts) -> Facts:
    return {**biases(keys), "qk_norm": True, "whole_qk_norm": True, "norms": ("after",)}


def _olmo3(keys: Keys, plain: KnownFacts) -> Facts:
    types, windows = every(keys, plain, 4, 4096)
    ropes = _two_ropes(keys, plain, types, OLMO3)
    return {**_olmo2(keys, plain), "layer_ropes": ropes, "sliding_windows": windows}


def _granite(keys: Keys, plain: KnownFacts) -> Facts:
    return {
        **_llama(keys, plain), "embed_scale": keys.number("embedding_multiplier", 1.0),
        "attention_scale": keys.number("attention_multiplier", 1.0),
        "residual_scale": keys.number("residual_multiplier", 1.0),
        "logits_scale": 1 / keys.number("logits_scaling", 1.0),
    }  # fmt: skip


def _smollm3(keys: Keys, plain: KnownFacts) -> Facts:
    layers = plain.num_layers
    rotated = rotated_layers(keys, layers)
    used = keys.flag("use_sliding_window", False)
    windows = one_window(keys, layers, absent=None)
    absent = [SLIDING if used and window and not each else FULL for window, each in zip(windows, rotated, strict=True)]
    ropes = tuple(plain.rope if each else None for each in rotated)
    types = layer_types(keys, layers, absent)
    return {**_llama(keys, plain), "layer_ropes": ropes, "sliding_windows": typed_windows(types, windows)}


def _glm(keys: Keys, plain: KnownFacts) -> Facts:
    facts = {"qkv_bias": keys.flag("attention_bias", True), "rope": replace(plain.rope, interleaved=True)}
    end_ids = keys.token_ids("eos_token_id", ()) or GLM_END_IDS  # `null` means the default here
    return {**facts, "eos_token_ids": end_ids}


def _glm4(keys: Keys, plain: KnownFacts) -> Facts:
    return {**_glm(keys, plain), "norms": ("before", "after")}


PHI3 = Defaults(
    "phi3",
    max_position=4096,
    original_max_position=4096,
    norm_eps=1e-5,
    partial_rotation=1.0,
    eos_token_ids=(32000,),
    bos_token_ids=(1,),
    # "su" and "yarn" are the names of longrope in early Phi-3 files.
    rope_names={"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"},
)
GEMMA2 = Defaults(
    "gemma2", max_position=8192, num_kv_heads=4, head_dim=256, eos_token_ids=(1,), bos_token_ids=(2,), tied=True,
    activation=("hidden_activation", "gelu_pytorch_tanh"),
)  # fmt: skip
GEMMA3 = replace(GEMMA2, family="gemma3", max_position=131072, theta=1e6, local_theta=("rope_local_base_freq", 10000.0))
OLMO2 = Defaults("olmo2", max_position=2048, norm_eps=1e-5, eos_token_ids=(50279,))
OLMO3 = replace(OLMO2, family="olmo3", theta=500000.0, local_theta=(None, 500000.0))
GLM = Defaults(
    "glm", max_position=131072, norm_eps=1.5625e-7, num_kv_heads=2, head_dim=128, partial_rotation=0.5
)  # fmt: skip
LLAMA = Defaults("llama", max_position=2048, eos_token_ids=(2,), bos_token_ids=(1,))
SMOLLM3 = Defaults(
    "smollm3",
    max_position=32768,
    num_kv_heads=4,
    eos_token_ids=(128001,),
    bos_token_ids=(128000,),
    tied=True,
    theta=2e6,
)
DENSE: Mapping[str, Family] = {
    "Gemma2ForCausalLM": Family(GEMMA2, _gemma2),
    "Gemma3ForCausalLM": Family(GEMMA3, _gemma3),
    "Gemma3ForConditionalGeneration": Family(
        GEMMA3, _gemma3_vision, inner={"num_attention_heads": 8, "vocab_size": 262208}
    ),
    "Glm4ForCausalLM": Family(replace(GLM, family="glm4"), _glm4),
    "GlmForCausalLM": Family(GLM, _glm),
    "GraniteForCausalLM": Family(replace(LLAMA, family="granite"), _granite),
    "LlamaForCausalLM": Family(LLAMA, _llama),
    "MiMoForCausalLM": Family(Defaults("mimo", max_position=32768, num_kv_heads=32), _mimo),
    "MistralForCausalLM": Family(
        Defaults("mistral", max_position=131072, num_kv_heads=8, eos_token_ids=(2,), bos_token_ids=(1,)), _mistral
    ),
    "Olmo2ForCausalLM": Family(OLMO2, _olmo2),
    "Olmo3ForCausalLM": Family(OLMO3, _olmo3),
    "Phi3ForCausalLM": Family(PHI3, _phi3),
    "Qwen2ForCausalLM": Family(Defaults("qwen2", max_position=32768, num_kv_heads=32), _qwen2),
    "Qwen3ForCausalLM": Family(Defaults("qwen3", max_position=32768, num_kv_heads=32, head_dim=128), _qwen3),
    "Qwen3VLForConditionalGeneration": Family(
        Defaults("qwen3_vl", max_position=128000, num_kv_heads=32, head_dim=128, theta=500000.0), _qwen3_vl, inner={}
    ),
    "SmolLM3ForCausalLM": Family(SMOLLM3, _smollm3),
}
FAMILIES: Mapping[str, Family] = dict(sorted({**DENSE, **EXPERT_FAMILIES}.items()))
