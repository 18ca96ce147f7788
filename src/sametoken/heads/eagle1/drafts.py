"""EAGLE-1 and EAGLE-2: heads that read the target's last hidden state, after its norm, and predict the next one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sametoken.heads.eagle.config import EagleConfig
from sametoken.heads.eagle.drafts import Eagle
from sametoken.heads.eagle.facts import facts_of
from sametoken.heads.eagle.layouts import Table, block_fields
from sametoken.heads.eagle.module import EagleHead
from sametoken.heads.eagle.names import eagle_tensors
from sametoken.heads.eagle.reading import EagleReader
from sametoken.heads.files import Files
from sametoken.heads.kind import Described, Written
from sametoken.kinds import OURS
from sametoken.model.config import ModelConfig
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


class Eagle1(Eagle):
    """Kind of EAGLE-1 heads, with chains or EAGLE-2's trees."""

    paired = False

    def describe(self, files: Files, target: ModelConfig) -> Described:
        reader = Eagle1Reader(files, target)
        config = reader.config()
        facts = facts_of(config, target, "the target's last hidden state, after its norm")
        return Described(config, reader.producer, tuple(reader.notes), facts)

    def lay_out(self, head: EagleHead, target: ModelConfig, layout: str, target_name: str) -> Written:
        return Written(config_json(head.config, layout), stored(head, layout), "model.safetensors")

    def table(self, config: EagleConfig, tensors: Mapping[str, Tensor | Coded] | None) -> Table:
        return refusals(config, tensors)

    def title(self, config: EagleConfig) -> str:
        return "EAGLE-1 (also EAGLE-2's)"


class Eagle1Reader(EagleReader):
    """Reader of the configuration of an EAGLE-1 head."""

    version = 1
    built = "have no hidden_norm, which is how EAGLE-1 and EAGLE-2 are built"

    def parts(self) -> dict[str, Any]:
        return {
            "taps": (),
            "fc_bias": self.part("fc.bias", "bias"),
            "input_norm": self.part("layers.0.input_layernorm.weight", "use_input_layernorm_in_first_layer"),
            "last_norm": self.part("norm.weight", "use_last_layernorm"),
        }

    def draft_vocabulary(self, rows: int) -> int:
        return rows

    def fused(self, width: int) -> tuple[bool, str]:
        expected = 2 * self.target.hidden_size
        return width == expected, str(expected)
