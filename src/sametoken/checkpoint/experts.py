"""Experts that a file holds in one tensor, taken apart: one weight for each, under the name of a plain linear."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from sametoken.checkpoint.quantised.collect import Item
from sametoken.errors import CheckpointError
from sametoken.model.config import ModelConfig

FUSED = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)(_bias)?")
SINGLE = re.compile(r"(.*\.mlp\.experts)\.\d+\.(gate_up_proj|down_proj)\.(weight|bias)")


def single_experts(stored: Iterable[Item], config: ModelConfig) -> Iterator[Item]:
    """The same tensors, with those that hold all experts of a block as views of each expert's own.

    Raises:
        CheckpointError: a tensor's first dimension is not the number of experts.
    """
    for item in stored:
        match = FUSED.fullmatch(item.name)
        if config.experts is None or match is None or not isinstance(item.tensor, Tensor):
            yield item
            continue
        count = config.experts.count
        sizes = 1 if match[3] else 2
        if item.tensor.dim() != 1 + sizes or item.tensor.shape[0] != count:
            raise CheckpointError(
                f"{item.name} has shape {list(item.tensor.shape)}, expected {count} experts of {sizes} dimensions; "
                "config.json and the weights describe different models",
                field=str(item.file),
            )
        for expert, weight in enumerate(item.tensor):
            if config.family == "gpt_oss":
                weight = _own_order(weight, paired=match[2] == "gate_up_proj")
            yield Item(f"{match[1]}.{expert}.{match[2]}.{'bias' if match[3] else 'weight'}", weight, item.file)


def _own_order(stored: Tensor, *, paired: bool) -> Tensor:
    """A weight [in, out] or bias [out] of gpt-oss as [out, ...], with gates before ups where they alternate."""
    turned = stored.t() if stored.dim() == 2 else stored
    return torch.cat([turned[::2], turned[1::2]]) if paired else turned


def joined_experts(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Tensors as gpt-oss's files have them: those of all experts in one, in its order; the reverse of the above."""
    found: dict[str, list[Tensor]] = defaultdict(list)
    for name, tensor in tensors:
        match = SINGLE.fullmatch(name)
        if match is None:
            yield name, tensor
            continue
        paired = match[2] == "gate_up_proj"
        stored = torch.stack(tensor.chunk(2), 1).flatten(0, 1) if paired else tensor
        ending = "_bias" if match[3] == "bias" else ""
        found[f"{match[1]}.{match[2]}{ending}"].append(stored.t() if stored.dim() == 2 else stored)
    for name, experts in found.items():
        yield name, torch.stack(experts)
