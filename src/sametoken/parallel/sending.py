"""Messages of rank 0 before each computation of a model: tokens, places, and changes of the caches since the last one.

The other ranks have no other state of the engine, so that states cannot diverge.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from sametoken.errors import EngineError
from sametoken.parallel.group import RankGroup
from sametoken.parallel.messages import ChainsOfGuesses, Changes, Forward, Moved, Scores, draws_of, packed
from sametoken.runtime.cache import PageTable, View
from sametoken.runtime.ranks import NativeExchange
from sametoken.speculation.rows import Sampling


class Sending:
    """Sender shared by the models of rank 0, which compute one at a time with one page table.

    Attributes:
        turn: lock held during a computation.
    """

    def __init__(self, group: RankGroup) -> None:
        self.group, self.turn = group, threading.Lock()
        self.moved: list[Moved] = []
        self._pages: dict[int, list[int]] = {}  # pages of rows in the other ranks

    def enter(self) -> None:
        """Acquire the turn, which excludes other computations until its release.

        An interrupted forward or message never releases the turn, since the ranks are no longer in step.
        """
        if not self.turn.acquire(blocking=False):
            words = "a forward was interrupted, after which the ranks cannot go on; make a new LLM"
            raise self.group.failure or EngineError(words)

    def changes(self, table: PageTable, rows: Iterable[int]) -> Changes:
        """Unsent changes of the caches for `rows` of the next computation."""
        pages = {row: list(table.owned(row)) for row in rows}
        changed = {row: owned for row, owned in pages.items() if self._pages.get(row, []) != owned}
        self._pages.update(changed)
        moved, self.moved = self.moved, []
        return Changes(moved, changed)


class LeadingRank:
    """`Ranks` of a model on rank 0.

    Args:
        sending: sender of all models.
        model: number of the model, see `Models`.
    """

    def __init__(self, sending: Sending, model: int) -> None:
        self._sending, self._group, self._model = sending, sending.group, model
        self.sum, self.share = self._group.sum, self._group.share

    @property
    def native(self) -> NativeExchange | None:
        """Implement `Ranks.native`."""
        return self._group.native

    def begin(self, tokens: Tensor, view: View) -> None:
        """Send the inputs of the forward."""
        self._sending.enter()
        rows = [span.rows.tolist() for span in view.spans]
        changes = self._sending.changes(view.table, (row for each in rows for row in each))
        spans = [packed(span, own) for span, own in zip(view.spans, rows, strict=True)]
        self._group.send(Forward(self._model, changes, tokens.tolist(), spans))

    def begin_chains(
        self, table: PageTable, rows: Sequence[int], starts: Sequence[int], tokens: Sequence[Sequence[int]],
        skipped: Sequence[int], levels: int, sampling: Sampling,
    ) -> None:  # fmt: skip
        """Send the inputs of the drafting."""
        self._sending.enter()
        changes, read = self._sending.changes(table, rows), [list(each) for each in tokens]
        self._group.send(
            ChainsOfGuesses(
                self._model, changes, list(rows), list(starts), read, list(skipped), levels, draws_of(sampling)
            )
        )

    def end(self, last: Tensor) -> None:
        """Raise the error of a failed forward."""
        self._sending.turn.release()
        self._group.end(last)

    def score(self, last: Tensor) -> None:
        """Send the hidden states."""
        self._sending.enter()
        self._group.send(Scores(self._model, last.contiguous().view(torch.uint8).numpy().tobytes()))

    def gather(self, own: Tensor, begins: Sequence[int]) -> Tensor:
        """Implement `Ranks.gather`."""
        found = self._group.gather(own, begins)
        self._sending.turn.release()
        return found

    def commit(self, rows: Tensor, starts: Tensor, path: Tensor) -> None:
        """Queue the committed nodes for the next message."""
        self._sending.moved.append(Moved(self._model, rows.tolist(), starts.tolist(), path.tolist()))
