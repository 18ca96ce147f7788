"""What drafters share that grow chains and trees with a model over a cache: their rows, and how far a draft may go.

Whether the model is a decoder or a head, and what it reads, is theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from sametoken.drafters.base import Drafter


class Row(Protocol):
    """One sequence, of which the first `length` slots are in the drafter's cache."""

    length: int


R = TypeVar("R", bound=Row)


class GrowingDrafter(Drafter, Generic[R]):
    """Drafts grown level by level.

    Args:
        device: where the model is.
        max_draft_len: depth of a tree, at most `budget`.
        branches: candidates that each level keeps and expands; 1 is a chain.
        budget: draft tokens a proposal keeps of all candidates, best cumulative score first; None is one path.
    """

    runs_model = True

    def __init__(self, device: torch.device, max_draft_len: int, branches: int, budget: int | None) -> None:
        self.budget, self.branches = budget if budget is not None else max_draft_len, branches
        self.max_draft_len = min(max_draft_len, self.budget)  # a path has no more nodes than its draft
        # The cache must hold what is proposed and, past the committed length, what is run to propose it.
        self.nodes = self.slots(self.max_draft_len)
        self._rows: dict[int, R] = {}
        self._device = device

    def release(self, row: int) -> None:
        self._rows.pop(row, None)

    def held(self, row: int) -> int:
        return self._rows[row].length

    def slots(self, limit: int) -> int:
        return max(self._kept(limit), self.branches * (min(limit, self.max_draft_len) - 1))

    def _kept(self, limit: int) -> int:
        """Draft tokens of a proposal: their share of the budget, but at least a whole path."""
        limit = min(limit, self.max_draft_len)
        return max(limit, -(-self.budget * limit // self.max_draft_len))

    def _ints(self, values: Sequence[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
