"""The engines that heads are written for, and asking a head's kind how.

What each reader accepts was read in vLLM 0.33, SGLang 0.5.23, TensorRT-LLM's PyTorch models (2026) and speculators 0.9;
`hf` is our own layout, which all of them read where they can. A refusal names the engine, the part and the reason.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from sametoken.heads.kind import Head, HeadConfig, Written
from sametoken.heads.registry import head_kind
from sametoken.model.config import ModelConfig

ENGINES = {
    "hf": "sametoken",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "trtllm": "TensorRT-LLM",
    "speculators": "speculators",
}


def lay_out(head: Head, target: ModelConfig, layout: str, target_name: str) -> Written:
    """A head as `layout` has it; nothing is refused here."""
    return head_kind(head.config).lay_out(head, target, layout, target_name)


def refusals(config: HeadConfig, layout: str, tensors: Mapping[str, Tensor] | None = None) -> list[str]:
    """Why an engine cannot run a head as it was trained, one reason each; none means that it can.

    Args:
        tensors: of the head by stored name, where values decide; without them such a part counts as in use.
    """
    return head_kind(config).refusals(config, layout, tensors)


def advice(config: HeadConfig, layout: str) -> tuple[str, ...]:
    """What to know when serving an exported head, one sentence each."""
    return head_kind(config).advice(config, layout)
