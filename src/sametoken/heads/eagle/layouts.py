"""Common export of EAGLE heads of all versions: fields of blocks in config.json, tables of refusals, advice."""

from __future__ import annotations

from typing import Any

from sametoken.heads.eagle.config import EagleConfig
from sametoken.model.config import ModelConfig
from sametoken.model.rope_config import RopeConfig

PROPOSED = 5  # draft tokens per step that a written file suggests; users may override it
Table = list[tuple[bool, tuple[str, ...], str]]  # true if the part is in use, engines that refuse it, reason


def reasons(table: Table, layout: str) -> list[str]:
    """Reasons why an engine refuses a head, from a table of parts."""
    return [reason for used, layouts, reason in table if used and layout in layouts]


def how_to_serve(config: EagleConfig, layout: str) -> tuple[str, ...]:
    """Advice for serving the head with vLLM or SGLang, one sentence each."""
    if layout == "vllm":
        spec = f'{{"method": "{config.kind}", "model": "DIR", "num_speculative_tokens": {PROPOSED}}}'
        return (f"serve it with vllm serve TARGET --speculative-config '{spec}'",)
    if layout == "sglang":
        window = next((w for w in config.layers.sliding_windows if w is not None), None)
        flag = f" --speculative-draft-window-size {window}" if window else ""
        algorithm = config.kind.upper()
        return (f"serve it with --speculative-algorithm {algorithm} --speculative-draft-model-path DIR{flag}",)
    return ()


def block_fields(layers: ModelConfig) -> dict[str, Any]:
    """Configuration of the draft's blocks with Hugging Face's keys: every key written, none null."""
    fields: dict[str, Any] = {
        "model_type": "qwen3" if layers.qk_norm else "llama",
        "hidden_size": layers.hidden_size,
        "intermediate_size": layers.intermediate_size,
        "num_hidden_layers": layers.num_layers,
        "num_attention_heads": layers.num_heads,
        "num_key_value_heads": layers.num_kv_heads,
        "head_dim": layers.head_dim,
        "hidden_act": layers.activation,
        "rms_norm_eps": layers.norm_eps,
        "max_position_embeddings": layers.rope.max_position,
        "attention_bias": layers.out_bias,
        "mlp_bias": layers.mlp_bias,
        "tie_word_embeddings": False,
        "torch_dtype": layers.dtype,
        **_rope_fields(layers.rope, layers.head_dim),
    }
    if layers.qkv_bias != layers.out_bias:
        fields["qkv_bias"] = layers.qkv_bias
    if windows := [window for window in layers.sliding_windows if window is not None]:
        kinds = ["full_attention" if window is None else "sliding_attention" for window in layers.sliding_windows]
        fields |= {"sliding_window": windows[0], "use_sliding_window": True, "layer_types": kinds}
    if layers.eos_token_ids:
        ids = list(layers.eos_token_ids)
        fields["eos_token_id"] = ids if len(ids) > 1 else ids[0]
    if layers.bos_token_id is not None:
        fields["bos_token_id"] = layers.bos_token_id
    return fields


def _rope_fields(rope: RopeConfig, head_dim: int) -> dict[str, Any]:
    """RoPE with the keys of transformers 4 and 5, so that no reader uses a default or the target's RoPE instead."""
    scaling: dict[str, Any] = {"rope_type": rope.kind}
    if rope.kind != "default":
        scaling["factor"] = rope.factor
    if rope.kind in ("llama3", "yarn", "longrope"):
        scaling["original_max_position_embeddings"] = rope.original_max_position
    if rope.kind == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
    if rope.kind == "longrope":
        scaling |= {"short_factor": list(rope.short_factor), "long_factor": list(rope.long_factor)}
    optional = {name: getattr(rope, name) for name in ("attention_factor", "mscale", "mscale_all_dim")}
    scaling |= {name: value for name, value in optional.items() if value is not None}
    partial = {} if rope.dim == head_dim else {"partial_rotary_factor": rope.dim / head_dim}
    fields = {"rope_theta": rope.theta, "rope_parameters": {"rope_theta": rope.theta, **scaling, **partial}, **partial}
    return fields if rope.kind == "default" else {**fields, "rope_scaling": scaling}
