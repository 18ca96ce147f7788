"""Where decoding rows stand, in tensors that a captured step reads and writes in place.

A lane is a row of the page table in a batch of fixed size; lanes beyond the batch's rows pad it and do not move.
Legend: B lanes, N nodes of a lane's draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.runtime.transfer import upload


@dataclass(frozen=True, slots=True)
class Lanes:
    """All fields int64.

    Attributes:
        rows: [B] row of the page table.
        lengths: [B] committed tokens, at least 1.
        last: [B, 2] the last committed token and the pending one.
        limits: [B] longest useful draft.
        active: [B] 1, or 0 for padding.
        emitted: [B, 1 + N] of the latest step: how many tokens, and the target's draw after each node.
    """

    rows: Tensor
    lengths: Tensor
    last: Tensor
    limits: Tensor
    active: Tensor
    emitted: Tensor

    @classmethod
    def empty(cls, batch: int, nodes: int, device: torch.device) -> Lanes:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int64, device=device)

        return cls(zeros(batch), zeros(batch), zeros(batch, 2), zeros(batch), zeros(batch), zeros(batch, 1 + nodes))

    @property
    def batch(self) -> int:
        return self.rows.shape[0]

    @property
    def state(self) -> tuple[Tensor, Tensor]:
        """What a step changes and the next one reads."""
        return self.lengths, self.last

    def load(self, rows: Sequence[int], lasts: Sequence[tuple[int, int]], spare: int, numbers: Sequence[int]) -> None:
        """Seats rows in the first lanes.

        Args:
            rows: of the page table.
            lasts: last committed and pending token of each.
            spare: the row that padding lanes write to.
            numbers: committed lengths, then limits, of each row.
        """
        count, pads = len(rows), self.batch - len(rows)
        lengths, limits = numbers[:count], numbers[count:]
        for field, values in (
            (self.rows, [*rows, *[spare] * pads]),
            (self.lengths, [*lengths, *[1] * pads]),
            (self.limits, [*limits, *[0] * pads]),
            (self.active, [1] * count + [0] * pads),
        ):
            field.copy_(upload(values, field.device))
        flat = [token for pair in lasts for token in pair] + [0, 0] * pads
        self.last.copy_(upload(flat, self.last.device).view(-1, 2))
