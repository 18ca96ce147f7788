"""Export of an EAGLE-1 head for each engine: config.json, the tensors, and features that an engine lacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sametoken.heads.eagle.config import EagleConfig
from sametoken.heads.eagle.layouts import Table, block_fields
from sametoken.heads.eagle.module import EagleHead
from sametoken.heads.eagle.names import eagle_tensors
from sametoken.kinds import OURS
from sametoken.model.formats.coded import Coded


def config_json(config: EagleConfig, layout: str) -> dict[str, Any]:
    """Content of config.json of a head in `layout`."""
    names = {"vllm": "EagleLlamaForCausalLM", "sglang": "LlamaForCausalLMEagle"}
    made = {
        "architectures": [names.get(layout, "LlamaForCausalLM")],
        **block_fields(config.layers),
        "vocab_size": config.layers.vocab_size,
        OURS: {"version": 1},
    }
    if layout == "hf":  # elsewhere `bias` would mean the bias of attention
        made["bias"] = config.fc_bias
    return made


def stored(head: EagleHead, layout: str) -> dict[str, Tensor | Coded]:
    """Tensors of a head in `layout`.

    SGLang always reads a bias of `fc`, which stays uninitialised if missing; vLLM has none.
    """
    tensors = dict(eagle_tensors(head, head.config))
    if layout == "sglang" and "fc.bias" not in tensors:
        return {**tensors, "fc.bias": torch.zeros(head.config.layers.hidden_size, dtype=head.dtype)}
    return {name: tensor for name, tensor in tensors.items() if layout != "vllm" or name != "fc.bias"}


def refusals(config: EagleConfig, tensors: Mapping[str, Tensor | Coded] | None) -> Table:
    """Table of the parts of a head that some engine does not support."""
    layers = config.layers
    bias = None if tensors is None else tensors.get("fc.bias")
    biased = config.fc_bias and (not isinstance(bias, Tensor) or bool(bias.any()))
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
