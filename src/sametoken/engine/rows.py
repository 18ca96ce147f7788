"""The requests of an engine by their row of the page table, and the sampling of several of them as one batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sametoken.engine.plan import Decode, PromptPiece
from sametoken.engine.request import Request
from sametoken.speculation.sampling import Sampling


class Rows(dict[int, Request]):
    """Row -> request, for rows that are taken."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: tuple[list[Request], Sampling] | None = None

    def of(self, items: Iterable[Decode | PromptPiece]) -> list[Request]:
        """The requests of entries of a plan."""
        return [self[item.row] for item in items]

    def sampling(self, requests: Sequence[Request]) -> Sampling:
        """The requests' sampling, kept while the batch stays the same and nothing in it depends on history."""
        kept = self._kept
        if kept is not None and kept[1].reusable and kept[0] == requests:
            return kept[1]
        sampling = Sampling.of([request.sampling for request in requests])
        self._kept = (list(requests), sampling)
        return sampling
