"""Tiny random transformers models of every supported family, saved as a user would find them.

The weights are wide (standard deviation 0.2), so that logits differ clearly and a wrong detail shows.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    GlmConfig,
    GptOssConfig,
    GraniteConfig,
    Llama4Config,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3VLConfig,
    SmolLM3Config,
)

DEVICE = os.environ.get("SAMETOKEN_TEST_DEVICE", "cpu")  # where engines and decoders under test compute
VOCAB = 128
UNKNOWN = ("MiMoForCausalLM",)  # architectures that transformers lacks, whose tests are those of MTP
WIDTH = 0.2


class Tiny(NamedTuple):
    """A family member: its transformers config class, and what of it differs from the common tiny shape.

    `max_seq_len` is the context limit under which it is to be loaded, None for the model's own. `vision` is the
    configuration of a part that reads images; the rest is then that of the text part.
    """

    config: type[PreTrainedConfig]
    options: dict[str, Any]
    max_seq_len: int | None = None
    vision: dict[str, Any] | None = None


def rope(kind: str = "default", theta: float = 10000.0, **options: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": theta, **options}


SHORT = [1 + 0.1 * i for i in range(8)]
LONG = [1 + 0.8 * i for i in range(8)]
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
PHI = {"original_max_position_embeddings": 16, "max_position_embeddings": 128}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
WINDOWS = {"use_sliding_window": True, "sliding_window": 9}
GROUPS = {
    "n_routed_experts": 12, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 48,
    "n_shared_experts": 2,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
}  # fmt: skip
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}

LAYERS = {"sliding_attention": rope(theta=100.0), "full_attention": rope("linear", 50000.0, factor=4.0)}
YARN_LAYERS = {**LAYERS, "full_attention": rope("yarn", 50000.0, factor=4.0, original_max_position_embeddings=32)}
MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 9}
SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
}  # fmt: skip
QWEN_VISION = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
}  # fmt: skip

LLAMA4 = {
    "head_dim": 32, "intermediate_size_mlp": 80, "num_local_experts": 5, "attention_chunk_size": 9, "floor_scale": 4,
    "attn_scale": 0.3, "no_rope_layers": [1, 0, 1],
}  # fmt: skip
LLAMA4_VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32,
}  # fmt: skip

FAMILIES: dict[str, Tiny] = {
    "llama-2": Tiny(LlamaConfig, {"num_key_value_heads": 4}),
    "llama-3": Tiny(LlamaConfig, {"rope_parameters": rope(theta=500000.0)}),
    "llama-3.1": Tiny(LlamaConfig, {"rope_parameters": rope("llama3", 500000.0, **LLAMA3)}),
    "llama-3.2": Tiny(
        LlamaConfig,
        {"tie_word_embeddings": True, "head_dim": 64, "rope_parameters": rope("llama3", 500000.0, **LLAMA3)},
    ),
    "llama-biases": Tiny(LlamaConfig, {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu_pytorch_tanh"}),
    "llama-linear": Tiny(LlamaConfig, {"rope_parameters": rope("linear", factor=4.0), "hidden_act": "gelu"}),
    "llama-dynamic": Tiny(
        LlamaConfig, {"rope_parameters": rope("dynamic", factor=2.0), "max_position_embeddings": 40}, max_seq_len=128
    ),
    "llama-yarn": Tiny(LlamaConfig, {"rope_parameters": rope("yarn", factor=4.0, original_max_position_embeddings=32)}),
    "tinyllama": Tiny(LlamaConfig, {"num_attention_heads": 8, "num_key_value_heads": 1, "hidden_size": 128}),
    "mistral": Tiny(MistralConfig, {"sliding_window": 8}),
    "mistral-full": Tiny(MistralConfig, {"sliding_window": None, "head_dim": 32}),
    "phi-3-short": Tiny(
        Phi3Config,
        {**PHI, "original_max_position_embeddings": 96}
        | {"rope_parameters": rope("longrope", short_factor=SHORT, long_factor=LONG)},
        max_seq_len=96,
    ),
    "phi-3-long": Tiny(
        Phi3Config,
        {**PHI, "sliding_window": 11, "rope_parameters": rope("longrope", short_factor=SHORT, long_factor=LONG)},
    ),
    "phi-4-mini": Tiny(
        Phi3Config,
        {**PHI, "tie_word_embeddings": True, "num_key_value_heads": 2}
        | {
            "rope_parameters": rope(
                "longrope", short_factor=SHORT[:6], long_factor=LONG[:6], partial_rotary_factor=0.75
            )
        },
    ),
    "qwen-1.5": Tiny(Qwen2Config, {"num_key_value_heads": 4}),
    "qwen-2": Tiny(Qwen2Config, {"tie_word_embeddings": True, "rope_parameters": rope(theta=1000000.0)}),
    "qwen-2.5-windows": Tiny(Qwen2Config, {**WINDOWS, "max_window_layers": 1}),
    "qwen-2.5-yarn": Tiny(
        Qwen2Config, {"rope_parameters": rope("yarn", 1000000.0, factor=4.0, original_max_position_embeddings=32)}
    ),
    "qwen-3": Tiny(Qwen3Config, {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen-3-biases": Tiny(Qwen3Config, {"head_dim": 16, "attention_bias": True, **WINDOWS, "max_window_layers": 2}),
    "mixtral": Tiny(MixtralConfig, {"num_local_experts": 5, "sliding_window": 8}),
    "gpt-oss": Tiny(
        GptOssConfig,
        {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 32, "sliding_window": 9, "swiglu_limit": 0.7}
        | {"rope_parameters": rope("yarn", factor=4.0, truncate=False, original_max_position_embeddings=32)},
    ),
    "qwen-2-moe": Tiny(
        Qwen2MoeConfig,
        {**EXPERTS, **WINDOWS, "shared_expert_intermediate_size": 80, "mlp_only_layers": [1], "max_window_layers": 2},
    ),
    "qwen-3-moe": Tiny(
        Qwen3MoeConfig, {**EXPERTS, "norm_topk_prob": True, "head_dim": 32, "tie_word_embeddings": True}
    ),
    "qwen-3-moe-mixed": Tiny(Qwen3MoeConfig, {**EXPERTS, **WINDOWS, "attention_bias": True, "decoder_sparse_step": 2}),
    "gemma-2": Tiny(
        Gemma2Config,
        {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 9, "tie_word_embeddings": False}
        | {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 40.0, "attention_bias": True},
    ),
    "gemma-2-tied": Tiny(
        Gemma2Config, {"head_dim": 16, "sliding_window": 4, "initializer_range": 0.08, "num_hidden_layers": 6}
    ),
    "gemma-3": Tiny(
        Gemma3TextConfig,
        {**MIXED, "head_dim": 32, "query_pre_attn_scalar": 24, "rope_parameters": LAYERS, "tie_word_embeddings": False}
        | {"final_logit_softcapping": 40.0},
    ),
    "gemma-3-images": Tiny(
        Gemma3Config,
        {**MIXED, "head_dim": 16, "rope_parameters": LAYERS, "initializer_range": 0.08},
        vision=SIGLIP,
    ),
    "olmo-2": Tiny(Olmo2Config, {"attention_bias": True, "initializer_range": 0.3}),
    "olmo-3": Tiny(Olmo3Config, {**MIXED, "rope_parameters": YARN_LAYERS}),
    "granite-3": Tiny(
        GraniteConfig,
        {"embedding_multiplier": 3.0, "attention_multiplier": 0.1, "residual_multiplier": 0.4, "logits_scaling": 0.5}
        | {"attention_bias": True, "mlp_bias": True},
    ),
    "smollm-3": Tiny(SmolLM3Config, {"no_rope_layers": [1, 0, 1]}),
    "smollm-3-windows": Tiny(SmolLM3Config, {**WINDOWS, "no_rope_layer_interval": 2, "tie_word_embeddings": False}),
    "glm": Tiny(GlmConfig, {"head_dim": 32, "rope_parameters": rope(partial_rotary_factor=0.5)}),
    "glm-4": Tiny(Glm4Config, {"head_dim": 16, "attention_bias": False, "partial_rotary_factor": 0.75}),
    "deepseek-v3": Tiny(
        DeepseekV3Config,
        {**LATENT, **GROUPS, "q_lora_rank": 40, "attention_bias": True, "routed_scaling_factor": 1.7}
        | {"rope_parameters": rope("yarn", mscale=0.7, mscale_all_dim=1.1, **YARN)},
    ),
    "deepseek-v3-plain": Tiny(
        DeepseekV3Config,
        {**LATENT, **GROUPS, "q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False, "v_head_dim": 24}
        | {"tie_word_embeddings": True, "first_k_dense_replace": 2},
    ),
    "deepseek-v2": Tiny(
        DeepseekV2Config,
        {**LATENT, **GROUPS, "q_lora_rank": 40, "topk_method": "group_limited_greedy"}
        | {"rope_parameters": rope("yarn", mscale=0.707, mscale_all_dim=0.707, **YARN)},
    ),
    "deepseek-v2-lite": Tiny(DeepseekV2Config, {**LATENT, **GROUPS, "q_lora_rank": None}),
    "glm-4.5-moe": Tiny(
        Glm4MoeConfig,
        {**GROUPS, "attention_bias": True, "use_qk_norm": True, "head_dim": 32, "first_k_dense_replace": 1}
        | {"routed_scaling_factor": 1.7},
    ),
    "glm-4.5-moe-plain": Tiny(
        Glm4MoeConfig,
        {**GROUPS, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "first_k_dense_replace": 2}
        | {"n_shared_experts": 1, "tie_word_embeddings": True, "partial_rotary_factor": 0.75},
    ),
    "llama-4": Tiny(
        Llama4TextConfig,
        {**LLAMA4, "attention_bias": True, "interleave_moe_layer_step": 2, "rope_parameters": rope("llama3", **LLAMA3)},
    ),
    "llama-4-images": Tiny(
        Llama4Config,
        {**LLAMA4, "moe_layers": [0, 2], "num_experts_per_tok": 2, "use_qk_norm": False, "no_rope_layers": [0, 1, 1]}
        | {"layer_types": ["chunked_attention", "full_attention", "chunked_attention"]},
        vision=LLAMA4_VISION,
    ),
    "qwen-3-vl": Tiny(
        Qwen3VLConfig,
        {"head_dim": 32, "attention_bias": True, "rope_parameters": rope(mrope_section=[6, 5, 5])},
        vision=QWEN_VISION,
    ),
}

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": WIDTH,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def build(name: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """The random model of a family in float32 with eager attention; its biases and norms are random too.

    `changes` are to the family's config.
    """
    tiny = FAMILIES[name]
    stated = {**COMMON, **tiny.options, **changes}
    kind = AutoModelForCausalLM if tiny.vision is None else AutoModelForImageTextToText
    nested = {"text_config": stated, "vision_config": tiny.vision, "tie_word_embeddings": True}
    config = tiny.config(**(stated if tiny.vision is None else nested))
    torch.manual_seed(seed)
    model = kind.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    # transformers starts biases at 0 and norms at 1, which would hide a bias or a norm that is never applied.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=WIDTH)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=WIDTH)
    return model


def save(name: str, directory: Path, *, seed: int = 0, max_shard_size: str = "50GB") -> PreTrainedModel:
    """Save the random model of a family to `directory` and return it."""
    model = build(name, seed)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model
