"""Check that the weights of a target fit the free memory, by config.json alone, before any of them is read."""

from __future__ import annotations

import torch

from sametoken.checkpoint.quantised.scheme import Scheme
from sametoken.errors import MemoryPlanError
from sametoken.model.config import ModelConfig
from sametoken.model.cut import cut
from sametoken.model.formats.names import least_bytes
from sametoken.runtime.memory import available_bytes, flush_advice
from sametoken.runtime.ranks import RankPart


def check_memory(
    model: str, stated: ModelConfig, limit: int, dtype: torch.dtype, device: torch.device, quantization: str,
    scheme: Scheme | None, share: float = 1.0,
) -> None:  # fmt: skip
    """Check that the weights of a model and its rotary tables fit the free memory.

    Args:
        limit: positions of the rotary tables.
        share: fraction of the weights on this host.

    Raises:
        MemoryPlanError: they do not fit; the message has the needed and the free GB.
    """
    name = quantization if quantization != "none" else str(dtype).removeprefix("torch.")
    name, size = (name, least_bytes(quantization, dtype)) if scheme is None else (scheme.name, scheme.bits / 8)
    weights = stated.parameters * size * share
    rotated = sum(rope.dim for rope in {*stated.ropes} if rope is not None)
    tables = limit * rotated * (2 * dtype.itemsize + 6)  # cos and sin, and their float32 intermediates
    free = available_bytes(device)
    if weights + tables <= free:
        return
    if weights <= free:
        raise MemoryPlanError(
            f"rotary tables for {limit} positions take {tables / 1e9:.1f} GB in addition to {weights / 1e9:.1f} GB of "
            f"weights, and {free / 1e9:.1f} GB are free; lower max_seq_len"
        )
    if flush := flush_advice(device, int(weights + tables)):
        raise MemoryPlanError(
            f"{model} takes {(weights + tables) / 1e9:.1f} GB, and the device has {free / 1e9:.1f} GB free; {flush}"
        )
    smaller = "" if scheme or quantization.startswith("int4") or device.type != "cpu" else "quantization int8 or int4, "
    raise MemoryPlanError(
        f"the weights of {model} take {weights / 1e9:.1f} GB ({stated.parameters / 1e9:.2f} billion numbers in "
        f"{name}), and {free / 1e9:.1f} GB are free; use {smaller}a smaller model or a larger machine; "
        f"`sametoken doctor {model}` shows what fits"
    )


def times_held(stated: ModelConfig, count: int) -> float:
    """Number of copies of a target that `count` ranks hold together; above 1, since each rank has the embedding.

    Raises:
        ConfigError, UnsupportedModelError: the target cannot be cut into `count` parts.
    """
    return count * cut(stated, RankPart(0, count)).parameters / stated.parameters
