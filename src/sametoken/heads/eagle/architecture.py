"""Configuration of new EAGLE heads, from settings, a file with the keys of config.json, and the target.

Keys of the file override settings; keys that follow from the target may be repeated but not changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sametoken.errors import ConfigError, unknown_name
from sametoken.model.config import ModelConfig
from sametoken.model.rope_config import RopeConfig

THETA = 10000.0  # a draft has its own RoPE; published heads were trained with this base

# Keys of a head's config.json in ModelOpt, SpecForge, transformers and our own files.
BLOCK_KEYS = {
    "num_hidden_layers": "num_layers",
    "intermediate_size": "intermediate_size",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "norm_eps",
    "hidden_act": "activation",
    "max_position_embeddings": "max_position",
    "attention_bias": "qkv_bias",
    "mlp_bias": "mlp_bias",
}
HEAD_KEYS = {
    "use_input_layernorm_in_first_layer": "input_norm",
    "use_last_layernorm": "last_norm",
    "norm_before_residual": "norm_before_residual",
    "norm_before_fc": "norm_before_fc",
    "fc_norm": "fc_norm",
    "norm_output": "norm_output",
    "bias": "fc_bias",
}
# Defaults of a head's blocks that are taken from the target.
TAKEN = (
    "vocab_size", "hidden_size", "intermediate_size", "norm_eps", "max_position", "eos_token_ids", "bos_token_id"
)  # fmt: skip
OTHER_KEYS = ("eagle_aux_hidden_state_layer_ids", "rope_theta", "sliding_window")
# Keys that follow from the target, the mode or the draft vocabulary; a file may repeat but not change them.
FIXED_KEYS = ("hidden_size", "vocab_size", "draft_vocab_size", "use_aux_hidden_state", "torch_dtype", "dtype")


def fixed_by(target: ModelConfig, vocabulary: int) -> dict[str, Any]:
    """Keys that follow from the target and the draft vocabulary."""
    return {
        "hidden_size": target.hidden_size, "vocab_size": target.vocab_size, "draft_vocab_size": vocabulary,
        "torch_dtype": target.dtype, "dtype": target.dtype,
    }  # fmt: skip


def flags_of(given: Mapping[str, Any]) -> dict[str, bool]:
    """Flags of the head's parts that a file sets, by their names in `EagleConfig`."""
    return {ours: given[key] for key, ours in HEAD_KEYS.items() if key in given}


def blocks_of(settings: Any, target: ModelConfig, given: Mapping[str, Any]) -> ModelConfig:
    """Configuration of the draft's own blocks, by default those of a Llama as wide as the target."""
    values = {ours: given[key] for key, ours in BLOCK_KEYS.items() if key in given}
    layers = values.pop("num_layers", settings.eagle_num_layers)
    biased = values.get("qkv_bias", False)  # in a Llama, `attention_bias` applies to all projections
    window = given.get("sliding_window", settings.draft_window)
    taken = {name: getattr(target, name) for name in TAKEN} | target.plain_heads
    head_dim, positions = values.get("head_dim", taken["head_dim"]), values.get("max_position", target.max_position)
    rope = RopeConfig("default", float(given.get("rope_theta", THETA)), head_dim, positions, positions)
    return ModelConfig(
        architecture="LlamaForCausalLM", family="llama", tie_word_embeddings=False, num_layers=layers,
        sliding_windows=(window,) * layers, rope=rope, dtype="bfloat16",
        **{**taken, "activation": "silu", "qkv_bias": biased, "out_bias": biased, **values},
    )  # fmt: skip


def check_keys(given: Mapping[str, Any], fixed: Mapping[str, Any], file: str | None) -> None:
    """Raise for keys of a file that are unknown or differ from the fixed values.

    Raises:
        ConfigError: the message names the key.
    """
    known = (*BLOCK_KEYS, *HEAD_KEYS, *OTHER_KEYS, *FIXED_KEYS)
    for key, value in given.items():
        if key not in known:
            raise ConfigError(f"--eagle-config {file}: {unknown_name('key', key, known)}")
        if key in fixed and value != fixed[key]:
            raise ConfigError(f"--eagle-config {file}: {key} is {value!r}, expected {fixed[key]!r}, or leave it out")
