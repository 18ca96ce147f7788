"""Requests of an engine by their row of the page table, and the sampling of several of them as one batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sametoken.engine.plan import Decode, PromptPiece
from sametoken.engine.request import Request
from sametoken.speculation.sampling import Sampling

MOST_KEPT = 64  # kept batches


class Rows(dict[int, Request]):
    """Requests by row, for rows that are taken."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[tuple[int, ...], Sampling] = {}  # by the requests' ids

    def of(self, items: Iterable[Decode | PromptPiece]) -> list[Request]:
        """Requests of the entries of a plan."""
        return [self[item.row] for item in items]

    def sampling(self, requests: Sequence[Request]) -> Sampling:
        """Sampling of the requests, reused for an unchanged batch if no part of it depends on history."""
        key = tuple(request.id for request in requests)
        sampling = self._kept.get(key)
        if sampling is None:
            sampling = Sampling.of([request.sampling for request in requests])
            if sampling.reusable:
                if len(self._kept) >= MOST_KEPT:
                    self._kept.clear()
                self._kept[key] = sampling
        return sampling
