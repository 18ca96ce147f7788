"""Stored draft vocabulary of an EAGLE head: d2t (offsets from draft ids to target ids) and t2d (mask of target ids)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from sametoken.checkpoint.quantised.collect import Item
from sametoken.checkpoint.tensors import Stored
from sametoken.errors import CheckpointError, DraftMismatchError
from sametoken.heads.eagle.config import EagleConfig
from sametoken.heads.eagle.names import MAPS, plain_name


@dataclass
class WithMaps:
    """Iterator over stored tensors that sets the integer maps of the vocabulary aside."""

    tensors: Iterator[Stored | Item]
    maps: dict[str, Tensor] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Stored | Item]:
        for item in self.tensors:
            if (name := plain_name(item.name)) in MAPS and isinstance(item.tensor, Tensor):
                self.maps[name] = item.tensor.clone()
            yield item


def offsets(maps: Mapping[str, Tensor], config: EagleConfig, directory: Path) -> Tensor:
    """Offsets d2t as int64, checked against the vocabulary and t2d."""
    size, vocabulary = config.draft_vocab_size, config.layers.vocab_size
    for name, tensor in maps.items():
        if tensor.is_floating_point() or tensor.dim() != 1:
            raise CheckpointError(
                f"{directory}: {name} holds {tensor.dtype} of shape {list(tensor.shape)}, expected integers in a row"
            )
    d2t = maps["d2t"].long() if "d2t" in maps else torch.zeros(size, dtype=torch.int64)
    if len(d2t) != size:
        raise CheckpointError(f"{directory}: d2t has {len(d2t)} entries, expected {size}, one per draft token")
    if d2t.is_meta:
        return d2t
    ids = torch.arange(size) + d2t
    hint = "; d2t must hold offsets (target id - draft id), these may be ids" if d2t.max() >= vocabulary - size else ""
    if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
        raise DraftMismatchError(
            f"{directory}: d2t names tokens {int(ids.min())} to {int(ids.max())}, the target's vocabulary has "
            f"{vocabulary}{hint}"
        )
    if (different := len(torch.unique(ids))) != size:
        raise CheckpointError(f"{directory}: d2t names {different} different tokens, expected {size}{hint}")
    if "t2d" in maps:
        _check_mask(maps["t2d"], ids, vocabulary, directory)
    return d2t


def _check_mask(t2d: Tensor, ids: Tensor, vocabulary: int, directory: Path) -> None:
    if len(t2d) != vocabulary:
        raise DraftMismatchError(f"{directory}: t2d has {len(t2d)} entries, the target's vocabulary {vocabulary}")
    expected = torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, ids, True)
    wrong = (t2d.bool() != expected).nonzero()
    if len(wrong):
        raise CheckpointError(
            f"{directory}: t2d and d2t disagree about {len(wrong)} tokens, first about {int(wrong[0])}; one of them "
            "belongs to another head"
        )
