"""Families with mixtures of experts, as data; `families.py` has the dense ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sametoken.errors import CheckpointError, UnsupportedModelError, shown
from sametoken.model.expert_config import ExpertConfig, grouped, read_experts, sparse_layers
from sametoken.model.family import Facts, Family, KnownFacts, biases, every, further_layers, rotated_layers
from sametoken.model.keys import MOST_HEADS, MOST_LAYERS, MOST_WINDOW, Keys
from sametoken.model.latent_config import read_latent, score_scale
from sametoken.model.rope_config import Defaults
from sametoken.model.window_config import CHUNKED, FULL, NO_WINDOW, SLIDING, layer_types, one_window, qwen_windows

LOCAL_EXPERTS = ("num_local_experts", "num_experts")
# RoPE of gpt-oss for a file without one.
GPT_OSS_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096,
}  # fmt: skip


def _mixtral(keys: Keys, plain: KnownFacts) -> Facts:
    experts = read_experts(
        keys, LOCAL_EXPERTS, 8, chosen=2, width=plain.intermediate_size, normalised=True,
        layers=(True,) * plain.num_layers,
    )  # fmt: skip
    return {"sliding_windows": one_window(keys, plain.num_layers, absent=None), "experts": experts}


def _qwen2_moe(keys: Keys, plain: KnownFacts) -> Facts:
    experts = read_experts(
        keys, ("num_experts",), 60, chosen=4, layers=sparse_layers(keys),
        width=keys.integer("moe_intermediate_size", 1408), normalised=keys.flag("norm_topk_prob", False),
        shared=keys.integer("shared_expert_intermediate_size", 5632),
    )  # fmt: skip
    windows = qwen_windows(keys, plain.num_layers, alternating=True)
    return {"qkv_bias": keys.flag("qkv_bias", True), "sliding_windows": windows, "experts": experts}


def _qwen3_moe(keys: Keys, plain: KnownFacts) -> Facts:
    used = keys.flag("use_sliding_window", False)
    windows = one_window(keys, plain.num_layers, absent=4096) if used else (None,) * plain.num_layers
    if SLIDING in layer_types(keys, plain.num_layers, [FULL] * plain.num_layers) and not used:
        raise CheckpointError(NO_WINDOW)
    experts = read_experts(
        keys, LOCAL_EXPERTS, 128, chosen=8, layers=sparse_layers(keys),
        width=keys.integer("moe_intermediate_size", 768), normalised=keys.flag("norm_topk_prob", False),
    )  # fmt: skip
    return {**biases(keys), "qk_norm": True, "sliding_windows": windows, "experts": experts}


def _gpt_oss(keys: Keys, plain: KnownFacts) -> Facts:
    bias = keys.flag("attention_bias", True)
    experts = read_experts(
        keys, LOCAL_EXPERTS, 128, chosen=4, width=plain.intermediate_size, normalised=True,
        layers=(True,) * plain.num_layers,
    )  # fmt: skip
    clamp = keys.number("swiglu_alpha", 1.702), keys.number("swiglu_limit", 7.0)
    windows = every(keys, plain, 2, 128)[1]
    return {
        "qkv_bias": bias, "out_bias": bias, "sinks": True, "experts": replace(experts, bias=True, clamp=clamp),
        "sliding_windows": windows,
    }  # fmt: skip


def _first_dense(keys: Keys, plain: KnownFacts, group_best: int = 2, **absent: Any) -> ExpertConfig:
    """Experts of GLM-4.5 and DeepSeek: after some dense layers, with shared experts that have no gate.

    Args:
        group_best: see `ExpertConfig`.
        absent: values of absent keys.
    """
    first = keys.integer("first_k_dense_replace", absent["first_k_dense_replace"], MOST_LAYERS, least=0)
    width = keys.integer("moe_intermediate_size", absent["moe_intermediate_size"])
    experts = read_experts(
        keys, ("num_local_experts", "n_routed_experts"), absent["n_routed_experts"],
        chosen=absent["num_experts_per_tok"], width=width, normalised=keys.flag("norm_topk_prob", True),
        layers=tuple(i >= first for i in range(plain.num_layers)),
        shared=width * keys.integer("n_shared_experts", absent["n_shared_experts"]),
    )  # fmt: skip
    scale = keys.number("routed_scaling_factor", absent.get("routed_scaling_factor", 1.0))
    groups = absent.get("n_group", 1), absent.get("topk_group", 1)
    chosen = grouped(experts, keys, groups, group_best)
    return replace(chosen, shared_gate=False, weight_scale=scale, wide_router=True)


def _glm4_moe(keys: Keys, plain: KnownFacts) -> Facts:
    experts = _first_dense(
        keys, plain, first_k_dense_replace=1, moe_intermediate_size=1408, n_routed_experts=128, num_experts_per_tok=8,
        n_shared_experts=1,
    )  # fmt: skip
    return {
        "qkv_bias": keys.flag("attention_bias", False), "qk_norm": keys.flag("use_qk_norm", False),
        "experts": replace(experts, sigmoid=True, choice_bias=True), "further_layers": further_layers(keys, 1),
    }  # fmt: skip


def _deepseek(keys: Keys, plain: KnownFacts, *, interleaved: bool = True, wide: bool = False) -> Facts:
    """Facts that DeepSeek V2 and V3 have in common, without the experts."""
    latent = read_latent(keys, plain.num_heads)
    size = latent.unrotated + latent.rotated
    for key in ("moe_layer_freq", "ep_size"):
        if keys.integer(key, 1) != 1:
            raise UnsupportedModelError(f"config.json has {keys.values[key]} for {key!r}; supported: 1")
    return {
        "latent": latent, "num_kv_heads": plain.num_heads, "head_dim": size, "out_bias": latent.bias,
        "attention_scale": score_scale(keys, latent), "rope": replace(plain.rope, interleaved=interleaved, wide=wide),
    }  # fmt: skip


def _deepseek_v3(keys: Keys, plain: KnownFacts) -> Facts:
    if keys.integer("head_dim", plain.head_dim, MOST_HEADS) != plain.head_dim:
        raise CheckpointError(
            f"config.json has {keys.values['head_dim']} for 'head_dim', expected {plain.head_dim} as "
            "'qk_rope_head_dim', or no such key"
        )
    keys.choice("scoring_func", "sigmoid", ("sigmoid",))
    keys.choice("topk_method", "noaux_tc", ("noaux_tc",))
    experts = _first_dense(
        keys, plain, first_k_dense_replace=3, moe_intermediate_size=2048, n_routed_experts=256, num_experts_per_tok=8,
        n_shared_experts=1, n_group=8, topk_group=4, routed_scaling_factor=2.5,
    )  # fmt: skip
    return {
        **_deepseek(keys, plain, interleaved=keys.flag("rope_interleave", True)),
        "further_layers": further_layers(keys, 1), "experts": replace(experts, sigmoid=True, choice_bias=True),
    }  # fmt: skip


def _deepseek_v2(keys: Keys, plain: KnownFacts) -> Facts:
    for key in ("norm_topk_prob", "mlp_bias"):  # transformers ignores the first, and other engines do not
        if keys.flag(key, False):
            raise UnsupportedModelError(f"config.json has {key!r} true, which is not supported for DeepSeek V2")
    keys.choice("scoring_func", "softmax", ("softmax",))
    method = keys.choice("topk_method", "greedy", ("greedy", "group_limited_greedy"))
    limited = keys if method != "greedy" else keys.over({"n_group": 1, "topk_group": 1})
    experts = _first_dense(
        limited.over({"num_local_experts": keys.values.get("num_experts")}), plain, first_k_dense_replace=0,
        moe_intermediate_size=1407, n_routed_experts=64, num_experts_per_tok=None, n_shared_experts=2, group_best=1,
    )  # fmt: skip
    return {**_deepseek(keys, plain, wide=True), "experts": replace(experts, normalised=False)}


def _llama4(keys: Keys, plain: KnownFacts) -> Facts:
    layers, rotated = plain.num_layers, rotated_layers(keys, plain.num_layers)
    types = layer_types(keys, layers, [CHUNKED if each else FULL for each in rotated], CHUNKED)
    stated_chunk = "attention_chunk_size" in keys.values and (CHUNKED in types or keys.values["attention_chunk_size"])
    chunk = keys.integer("attention_chunk_size", None if stated_chunk else 8192, MOST_WINDOW)
    step = keys.integer("interleave_moe_layer_step", 1, MOST_LAYERS)
    stated = keys.values.get("moe_layers")
    sparse = list(range(step - 1, layers, step)) if stated is None else stated
    if not isinstance(sparse, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in sparse):
        raise CheckpointError(f"config.json has {shown(sparse)} for 'moe_layers', expected a list of layers or null")
    width = plain.intermediate_size
    experts = read_experts(
        keys, LOCAL_EXPERTS, 16, chosen=1, width=width, normalised=False, shared=width,
        layers=tuple(i in sparse for i in range(layers)),
    )  # fmt: skip
    scale = keys.number("floor_scale", 8192), keys.number("attn_scale", 0.1)
    rope = replace(plain.rope, interleaved=True, wide=True)
    return {
        **biases(keys), "intermediate_size": keys.integer("intermediate_size_mlp", 16384), "chunked": True,
        "sliding_windows": tuple(chunk if kind == CHUNKED else None for kind in types), "rope": rope,
        "layer_ropes": tuple(rope if each else None for each in rotated),
        "rotated_norm": keys.flag("use_qk_norm", True),
        "query_scale": scale if keys.flag("attn_temperature_tuning", True) else None,
        "experts": replace(experts, sigmoid=True, shared_gate=False, weighted_input=True),
    }  # fmt: skip


MIXTRAL = Defaults(
    "mixtral", max_position=131072, norm_eps=1e-5, num_kv_heads=8, eos_token_ids=(2,), bos_token_ids=(1,), theta=1e6
)
GPT_OSS = Defaults(
    "gpt_oss", max_position=131072, norm_eps=1e-5, num_kv_heads=8, head_dim=64, theta=150000.0, absent_rope=GPT_OSS_ROPE
)
GLM4_MOE = Defaults(
    "glm4_moe", max_position=131072, norm_eps=1e-5, num_kv_heads=8, partial_rotation=0.5
)  # fmt: skip

DEEPSEEK_V2 = Defaults(
    "deepseek_v2", max_position=2048, eos_token_ids=(2,), bos_token_ids=(1,), head_dim=64, head_key="qk_rope_head_dim"
)
DEEPSEEK_V3 = replace(DEEPSEEK_V2, family="deepseek_v3", max_position=4096, eos_token_ids=(1,), bos_token_ids=(0,))

LLAMA4 = Defaults(
    "llama4_text", max_position=131072, norm_eps=1e-5, num_kv_heads=8, head_dim=128, eos_token_ids=(2,),
    bos_token_ids=(1,), theta=500000.0,
)  # fmt: skip

EXPERT_FAMILIES: Mapping[str, Family] = {
    "DeepseekV2ForCausalLM": Family(DEEPSEEK_V2, _deepseek_v2),
    "DeepseekV3ForCausalLM": Family(DEEPSEEK_V3, _deepseek_v3),
    "Glm4MoeForCausalLM": Family(GLM4_MOE, _glm4_moe),
    "GptOssForCausalLM": Family(GPT_OSS, _gpt_oss),
    "Llama4ForCausalLM": Family(LLAMA4, _llama4),
    "Llama4ForConditionalGeneration": Family(LLAMA4, _llama4, inner={}, inner_tie=True),
    "MixtralForCausalLM": Family(MIXTRAL, _mixtral),
    "Qwen2MoeForCausalLM": Family(Defaults("qwen2_moe", max_position=32768, num_kv_heads=16), _qwen2_moe),
    "Qwen3MoeForCausalLM": Family(Defaults("qwen3_moe", max_position=32768, num_kv_heads=4), _qwen3_moe),
}
