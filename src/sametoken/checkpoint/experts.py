"""Experts that a file holds in one tensor, taken apart: one weight for each, under the name of a plain linear."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from torch import Tensor

from sametoken.checkpoint.quantised.collect import Item
from sametoken.errors import CheckpointError
from sametoken.model.config import ModelConfig

FUSED = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")


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
        if item.tensor.dim() != 3 or item.tensor.shape[0] != count:
            raise CheckpointError(
                f"{item.name} has shape {list(item.tensor.shape)}, expected {count} experts of two dimensions; "
                "config.json and the weights describe different models",
                field=str(item.file),
            )
        for expert, weight in enumerate(item.tensor):
            yield Item(f"{match[1]}.{expert}.{match[2]}.weight", weight, item.file)
