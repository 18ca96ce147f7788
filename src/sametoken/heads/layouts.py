"""How a head is written for each engine: config.json, the tensors' names, and what an engine does not implement.

What each reader accepts was read in vLLM 0.33, SGLang 0.5.23, TensorRT-LLM's PyTorch models (2026) and speculators 0.9;
`hf` is our own layout, which all of them read where they can. A refusal names the engine, the part and the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sametoken.checkpoint.contents import OURS
from sametoken.heads.anyhead import HeadConfig
from sametoken.heads.eagle.config import EagleConfig
from sametoken.heads.eagle.module import EagleHead
from sametoken.heads.eagle.names import eagle_tensors
from sametoken.heads.eagle.taps import IDS
from sametoken.heads.medusa.config import MedusaConfig
from sametoken.heads.medusa.module import MedusaHeads
from sametoken.heads.medusa.names import medusa_tensors
from sametoken.model.config import ModelConfig, RopeConfig

ENGINES = {
    "hf": "sametoken",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "trtllm": "TensorRT-LLM",
    "speculators": "speculators",
}
PROPOSED = 5  # tokens a round that a speculators file suggests; whoever serves it may say otherwise


class Written(NamedTuple):
    """What goes into a directory.

    Attributes:
        config: config.json.
        tensors: by the names in the file.
        file: name of the weight file.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    file: str


def lay_out(head: EagleHead | MedusaHeads, target: ModelConfig, layout: str, target_name: str) -> Written:
    """A head as `layout` has it; nothing is refused here."""
    if isinstance(head, MedusaHeads):
        return _medusa(head, layout, target_name)
    config = head.config
    tensors = dict(eagle_tensors(head, config))
    if config.version == 1:
        return Written(_eagle_1(config, layout), _tensors_of_1(tensors, config, layout), "model.safetensors")
    if config.draft_vocab_size < target.vocab_size:
        tensors["d2t"] = head.d2t.cpu()
        mask = torch.zeros(target.vocab_size, dtype=torch.bool)
        if layout != "trtllm":  # it would take t2d for an unknown weight
            tensors["t2d"] = mask.index_fill_(0, head.draft_ids.cpu(), True)
    named = {_name(name, config, layout): tensor for name, tensor in tensors.items()}
    made = _speculators(config, target, target_name) if layout == "speculators" else _eagle_3(config, layout)
    return Written(made, named, "model.safetensors")


def _name(name: str, config: EagleConfig, layout: str) -> str:
    """An EAGLE-3 tensor's name; a lone block is a `midlayer`, which every version of SGLang and EAGLE's code read."""
    if layout in ("hf", "sglang") and config.layers.num_layers == 1:
        return name.replace("layers.0.", "midlayer.")
    if layout == "trtllm" and not name.startswith("layers.0."):
        return name.replace(".input_layernorm.", ".hidden_norm.")  # what it calls the first norm of further blocks
    return name


def _eagle_3(config: EagleConfig, layout: str) -> dict[str, Any]:
    taps = list(config.taps)
    names = ["Eagle3Qwen3ForCausalLM"] if config.layers.qk_norm else ["LlamaForCausalLMEagle3"]
    made = {
        "architectures": names,
        **_block_fields(config.layers),
        "vocab_size": config.layers.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        **_flags(config),
        IDS: [tap + 1 for tap in taps],
        "eagle_config": {
            IDS: taps,
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": config.last_norm,
            "use_mtp_layernorm": False,
            "next_layer_regular": True,
            "norm_before_fc": config.norm_before_fc,
            "return_hidden_post_norm": config.norm_output,
        },
        OURS: {"version": 3, "taps": taps},
    }
    if layout == "sglang" and not config.own_head:
        made["draft_vocab_size"] = None  # how SGLang knows that the output layer is the target's
    return made


def _flags(config: EagleConfig) -> dict[str, bool]:
    return {
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
    }


def _speculators(config: EagleConfig, target: ModelConfig, target_name: str) -> dict[str, Any]:
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": PROPOSED,
        "accept_tolerance": 0.0,
        "verifier_accept_k": 1,
    }
    blocks = {**_block_fields(config.layers), "vocab_size": config.layers.vocab_size}
    if len(config.taps) != 3:
        blocks["num_aux_hidden_states"] = len(config.taps)  # vLLM takes three for granted, and looks for it here only
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target_name, "architectures": [target.architecture]},
        },
        "transformer_layer_config": blocks,
        "draft_vocab_size": config.draft_vocab_size,
        **_flags(config),
        IDS: [tap + 1 for tap in config.taps],
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": config.layers.dtype,
    }


def _eagle_1(config: EagleConfig, layout: str) -> dict[str, Any]:
    names = {"vllm": "EagleLlamaForCausalLM", "sglang": "LlamaForCausalLMEagle"}
    made = {
        "architectures": [names.get(layout, "LlamaForCausalLM")],
        **_block_fields(config.layers),
        "vocab_size": config.layers.vocab_size,
        OURS: {"version": 1},
    }
    if layout == "hf":  # elsewhere `bias` would mean that of attention
        made["bias"] = config.fc_bias
    return made


def _tensors_of_1(tensors: dict[str, Tensor], config: EagleConfig, layout: str) -> dict[str, Tensor]:
    """SGLang always reads a bias of `fc` and leaves it random if there is none; vLLM has none."""
    if layout == "sglang" and "fc.bias" not in tensors:
        return {**tensors, "fc.bias": torch.zeros_like(tensors["fc.weight"][:, 0])}
    return {name: tensor for name, tensor in tensors.items() if layout != "vllm" or name != "fc.bias"}


def _medusa(head: MedusaHeads, layout: str, target_name: str) -> Written:
    config, tensors = head.config, dict(medusa_tensors(head, head.config))
    if layout == "vllm":
        made: dict[str, Any] = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "num_heads": config.num_heads,
            "num_hidden_layers": config.num_layers,
            "medusa_fc_bias": True,
            "torch_dtype": config.dtype,
        }
        return Written(made, {_vllm_medusa(name): tensor for name, tensor in tensors.items()}, "model.safetensors")
    made = {
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
        "base_model_name_or_path": target_name,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "torch_dtype": config.dtype,
        OURS: {"choices": [list(path) for path in config.choices]},
    }
    return Written(made, tensors, "medusa_lm_head.safetensors")


def _vllm_medusa(name: str) -> str:
    head, block, *rest = name.split(".")  # I.J.linear.KIND or I.L.weight
    return f"blocks.{head}.layers.{block}.{rest[1]}" if rest[0] == "linear" else f"lm_heads.{head}.weight"


def _block_fields(layers: ModelConfig) -> dict[str, Any]:
    """The draft's own blocks in Hugging Face's words: everything written, nothing null."""
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
    """Rotation in transformers 4's and 5's spelling, so that no reader falls back on a default or on the target's."""
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


def refusals(config: HeadConfig, layout: str, tensors: Mapping[str, Tensor] | None = None) -> list[str]:
    """Why an engine cannot run a head as it was trained, one reason each; none means that it can.

    Args:
        tensors: of the head by stored name, where values decide; without them such a part counts as in use.
    """
    if isinstance(config, MedusaConfig):
        return _refusals_of_medusa(config, layout)
    if layout == "hf":
        return []
    table = _refusals_of_1(config, tensors) if config.version == 1 else _refusals_of_3(config)
    return [reason for used, layouts, reason in table if used and layout in layouts]


Table = list[tuple[bool, tuple[str, ...], str]]  # whether the part is in use, by whom it is refused, why


def _refusals_of_3(config: EagleConfig) -> Table:
    layers, windows = config.layers, {w for w in config.layers.sliding_windows if w is not None}
    engines, all_others = ("vllm", "sglang", "trtllm"), ("vllm", "sglang", "trtllm", "speculators")
    shared = config.target_hidden_size == layers.hidden_size
    uneven = layers.qkv_bias != layers.out_bias
    biased = layers.qkv_bias or layers.out_bias
    return [
        (config.norm_before_residual, ("sglang", "trtllm"), "norm_before_residual: its residual is the state before"),
        (config.norm_before_fc and config.fc_norm, all_others, "norm_before_fc with fc_norm: it computes one of them"),
        (not config.last_norm, all_others, "no last norm: it always has one"),
        (len(config.taps) == 1, engines, "one tap: it fuses several"),
        (layers.num_layers > 1, ("sglang",), "several blocks: it feeds the second one without the residual"),
        (layers.qk_norm, ("sglang", "trtllm"), "q_norm and k_norm: its draft attention has none"),
        (biased, ("sglang",), "attention biases: its draft attention has none"),
        (uneven, ("vllm", "trtllm", "speculators"), "a bias on only some projections: it has all or none"),
        (layers.mlp_bias, ("sglang",), "MLP biases: its draft has none"),
        (layers.mlp_bias and layers.qk_norm, ("vllm", "speculators"), "MLP biases in a Qwen3 block: it has none"),
        (layers.activation != "silu", engines, f"activation {layers.activation}: its draft has silu"),
        (config.own_embed, ("sglang",), "token vectors of its own: it takes the target's"),
        (config.own_embed and shared, ("trtllm",), "token vectors of its own: it takes the target's"),
        (not shared, ("speculators",), "a draft of another width than the target: it fuses equal widths"),
        (not config.own_head, ("speculators",), "no output layer of its own: it needs one"),
        (bool(windows), ("trtllm",), "a sliding window: its draft attends to everything"),
        (len(windows) > 1, all_others, "windows of several sizes: config.json has one"),
        (
            bool(windows) and None in layers.sliding_windows,
            ("sglang",),
            "a window on some blocks only: its flag is for the whole draft",
        ),
    ]  # fmt: skip


def _refusals_of_1(config: EagleConfig, tensors: Mapping[str, Tensor] | None) -> Table:
    layers = config.layers
    bias = None if tensors is None else tensors.get("fc.bias")
    biased = config.fc_bias and (bias is None or bool(bias.any()))
    both = ("vllm", "sglang")
    return [
        (True, ("trtllm",), "EAGLE-1: its PyTorch models have EAGLE-3 only"),
        (True, ("speculators",), "EAGLE-1: it was removed there"),
        (biased, ("vllm",), "a bias of fc: its EAGLE-1 has none"),
        (config.input_norm, both, "an input norm in the first block: it has none"),
        (config.last_norm, both, "a last norm: it has none"),
        (layers.qk_norm, both, "q_norm and k_norm: its draft attention has none"),
        (layers.qkv_bias != layers.out_bias, ("sglang",), "a bias on only some projections: it has all or none"),
        (layers.mlp_bias, ("sglang",), "MLP biases: its draft has none"),
        (layers.activation != "silu", both, f"activation {layers.activation}: its draft has silu"),
        (config.own_embed, ("sglang",), "token vectors of its own: it takes the target's"),
        (config.own_head, ("sglang",), "an output layer of its own: it takes the target's"),
        (any(layers.sliding_windows), ("sglang",), "a sliding window: its draft attends to everything"),
    ]  # fmt: skip


def _refusals_of_medusa(config: MedusaConfig, layout: str) -> list[str]:
    if layout in ("sglang", "trtllm", "speculators"):
        return ["Medusa: it has no such drafts" + (" in its PyTorch models" if layout == "trtllm" else "")]
    if layout == "vllm" and not config.own_heads:
        return ["heads without output layers: it reads a copy of the target's, which the head does not hold"]
    return []


def advice(config: HeadConfig, layout: str) -> tuple[str, ...]:
    """What to know when serving an exported head, one sentence each."""
    if isinstance(config, MedusaConfig):
        return ("vLLM serves Medusa up to 0.32 and drafts its best chain only",) if layout == "vllm" else ()
    method = "eagle3" if config.version == 3 else "eagle"
    match layout:
        case "vllm":
            spec = f'{{"method": "{method}", "model": "DIR", "num_speculative_tokens": {PROPOSED}}}'
            return (f"serve it with vllm serve TARGET --speculative-config '{spec}'",)
        case "sglang":
            window = next((w for w in config.layers.sliding_windows if w is not None), None)
            flag = f" --speculative-draft-window-size {window}" if window else ""
            return (f"serve it with --speculative-algorithm {method.upper()} --speculative-draft-model-path DIR{flag}",)
        case "trtllm":
            layers = list(config.taps)
            return (f"serve it with decoding_type: Eagle3 and eagle3_layers_to_capture: {layers}",)
        case "speculators":
            return ("vllm serve DIR finds the target by verifier.name_or_path, which must be a Hub id",)
    return ()
