"""Which rows draft and how far, such that their tokens take least time. Pure arithmetic on gains and seconds.

One length is chosen for the batch, each further level against the nodes and the draft forward that it costs, and the
rows that draft are chosen by what they gain. What is made least is the time that a token of a row takes, on average
over rows: most tokens per second of the batch would slow rows with wrong guesses for those with right ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import NamedTuple

from sametoken.control.cost import Costs

MARGIN = 0.05  # by how much drafts of many rows must promise to be faster: those that seem to gain most gain less


class DecodingRow(NamedTuple):
    """A row that decodes.

    Attributes:
        id: the request's.
        methods: drafters that it may use.
        limit: longest path that is of use to it.
        adaptive: whether its length is chosen; otherwise it is `limit`.
        context: tokens before the pending one.
        backlog: tokens that its draft model has yet to read.
        room: tokens that it may still emit.
    """

    id: int
    methods: tuple[str, ...]
    limit: int
    adaptive: bool
    context: int
    backlog: int
    room: int


@dataclass(frozen=True)
class StepBatch:
    """The rows of one step and what it costs.

    Attributes:
        beside: prompt tokens that the same forward reads.
        fixed: draft tokens that it computes whatever is chosen.
        slots: nodes of a draft of a method whose paths have at most so many tokens.
        ragged: whether a row computes its own nodes only; otherwise all compute as many as the widest draft.
    """

    rows: Sequence[DecodingRow]
    beside: int
    fixed: int
    slots: Callable[[str, int], int]
    costs: Costs
    ragged: bool = True

    def price(self, methods: Mapping[str, float], length: int, count: int) -> float:
        """Seconds of the step if `count` rows have paths of `length`; each of `methods` drafts for a share of them."""
        if not length or not count:
            return self._step(0)
        nodes, seconds = 0, 0.0
        for method, share in methods.items():
            nodes = max(nodes, self._slots(method, length))
            if share:
                first, level = self._levels(method, share * count)
                seconds += first + length * level
        return seconds + self._step(nodes * (count if self.ragged else len(self.rows)))

    @cached_property
    def _levels(self) -> Callable[[str, float], tuple[float, float]]:
        """`Costs.levels`, asked for every length."""
        return cache(self.costs.levels)

    @cached_property
    def _slots(self) -> Callable[[str, int], int]:
        """`slots`, asked for every number of rows."""
        return cache(self.slots)

    @cached_property
    def _step(self) -> Callable[[int], float]:
        """Seconds of the forward with so many draft nodes, which is asked for every number of rows."""
        size, tokens = len(self.rows), len(self.rows) + self.beside + self.fixed
        context = sum(row.context for row in self.rows) / size
        return cache(lambda nodes: self.costs.step(tokens + nodes, size, context))


def allocate(gains: Sequence[Sequence[float]], price: Callable[[int, int], float]) -> tuple[int, frozenset[int]]:
    """Length of the paths and the rows that draft, (0, none) if that does not pay: what takes a token of a row least
    time, on average over rows.

    Exact: for one length and one number of rows, the rows that gain most are the best.

    Args:
        gains: per row, guesses expected to come true with paths of 1, 2, .. tokens; the row has no longer ones, and
            an empty sequence never drafts.
        price: seconds of a step in which `rows` rows have paths of `length` tokens: price(length, rows).
    """
    best, choice = len(gains) * price(0, 0) / margin(len(gains)), (0, frozenset[int]())
    for length in range(1, max(map(len, gains), default=0) + 1):
        waits = {i: 1.0 / (1.0 + row[min(length, len(row)) - 1]) for i, row in enumerate(gains) if row}
        order = sorted(waits, key=lambda i: waits[i])
        for rows, total in enumerate(accumulate(waits[i] for i in order), start=1):
            seconds = (total + len(gains) - rows) * price(length, rows)
            if seconds < best:
                best, choice = seconds, (length, frozenset(order[:rows]))
    return choice


def margin(rows: int) -> float:
    """How many times faster than without drafts a draft must promise to be where one of `rows` rows may draft."""
    return 1.0 + MARGIN * (1.0 - 1.0 / rows)


def seconds_per_token(gains: Sequence[float], step: float) -> float:
    """What a token of each row takes, summed over rows, in steps of so many seconds with so many guesses come true."""
    return sum(1.0 / (1.0 + gain) for gain in gains) * step
