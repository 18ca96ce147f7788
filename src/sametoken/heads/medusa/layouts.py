"""Export of Medusa heads for each engine, and features that an engine lacks."""

from __future__ import annotations

from typing import Any

from sametoken.heads.kind import NO_SUCH_DRAFTS, Written
from sametoken.heads.medusa.config import MedusaConfig
from sametoken.heads.medusa.module import MedusaHeads
from sametoken.heads.medusa.names import medusa_tensors
from sametoken.kinds import OURS


def lay_out(head: MedusaHeads, layout: str, target_name: str) -> Written:
    """Files of heads in `layout`."""
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
        return Written(made, {_vllm_name(name): tensor for name, tensor in tensors.items()}, "model.safetensors")
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


def _vllm_name(name: str) -> str:
    head, block, *rest = name.split(".")  # I.J.linear.KIND or I.L.weight
    return f"blocks.{head}.layers.{block}.{rest[1]}" if rest[0] == "linear" else f"lm_heads.{head}.weight"


def refusals(config: MedusaConfig, layout: str) -> list[str]:
    """Reasons why an engine cannot run the heads."""
    if layout in ("sglang", "trtllm", "speculators"):
        return [NO_SUCH_DRAFTS]
    if layout == "vllm" and not config.own_heads:
        return ["heads without output layers: it reads a copy of the target's, which the head does not hold"]
    return []
