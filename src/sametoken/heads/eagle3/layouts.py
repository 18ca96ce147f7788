"""Export of an EAGLE-3 head for each engine: config.json, tensor names, and features that an engine lacks."""

from __future__ import annotations

from typing import Any

import torch

from sametoken.heads.eagle.config import EagleConfig
from sametoken.heads.eagle.layouts import PROPOSED, Table, block_fields
from sametoken.heads.eagle.module import EagleHead
from sametoken.heads.eagle.names import eagle_tensors
from sametoken.heads.eagle3.taps import IDS
from sametoken.heads.kind import Written
from sametoken.kinds import OURS
from sametoken.model.config import ModelConfig


def lay_out(head: EagleHead, target: ModelConfig, layout: str, target_name: str) -> Written:
    """Files of a head in `layout`."""
    config = head.config
    tensors = dict(eagle_tensors(head, config))
    if config.draft_vocab_size < target.vocab_size:
        tensors["d2t"] = head.d2t.cpu()
        mask = torch.zeros(target.vocab_size, dtype=torch.bool)
        if layout != "trtllm":  # it would reject t2d as an unknown weight
            tensors["t2d"] = mask.index_fill_(0, head.draft_ids.cpu(), True)
    named = {_name(name, config, layout): tensor for name, tensor in tensors.items()}
    made = _speculators(config, target, target_name) if layout == "speculators" else _hf(config, layout)
    return Written(made, named, "model.safetensors")


def _name(name: str, config: EagleConfig, layout: str) -> str:
    """Name of an EAGLE-3 tensor; a single block is a `midlayer`, for all versions of SGLang and EAGLE's code."""
    if layout in ("hf", "sglang") and config.layers.num_layers == 1:
        return name.replace("layers.0.", "midlayer.")
    if layout == "trtllm" and not name.startswith("layers.0."):
        return name.replace(".input_layernorm.", ".hidden_norm.")  # its name for the first norm of further blocks
    return name


def _hf(config: EagleConfig, layout: str) -> dict[str, Any]:
    taps = list(config.taps)
    names = ["Eagle3Qwen3ForCausalLM"] if config.layers.qk_norm else ["LlamaForCausalLMEagle3"]
    made = {
        "architectures": names,
        **block_fields(config.layers),
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
        made["draft_vocab_size"] = None  # by which SGLang uses the output layer of the target
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
    blocks = {**block_fields(config.layers), "vocab_size": config.layers.vocab_size}
    if len(config.taps) != 3:
        blocks["num_aux_hidden_states"] = len(config.taps)  # vLLM assumes three, and reads this key only
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


def refusals(config: EagleConfig) -> Table:
    """Table of the parts of a head that some engine does not support."""
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
