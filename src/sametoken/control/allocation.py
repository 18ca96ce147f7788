"""Which rows draft and how far, such that tokens per second are most. Pure arithmetic on gains and seconds.

One length is chosen for the batch, each further level against the nodes and the draft forward that it costs, and the
rows that draft are chosen by what they gain. The forward is priced as a rectangle (rows x nodes of the widest draft);
on a CPU it takes less, which leaves room for rows that gain nothing and wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import NamedTuple

from sametoken.control.cost import Costs

MARGIN = 1.01  # how many times faster than plain decoding a draft must promise to be


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
        floor: nodes of the widest draft that is made whatever is chosen.
        slots: nodes of a draft of a method whose paths have at most so many tokens.
    """

    rows: Sequence[DecodingRow]
    beside: int
    floor: int
    slots: Callable[[str, int], int]
    costs: Costs

    def price(self, methods: Mapping[str, float], length: int, count: int) -> float:
        """Seconds of the step if `count` rows have paths of `length`; each of `methods` drafts for a share of them."""
        nodes = max((self.slots(method, length) for method in methods), default=0) if length and count else 0
        seconds = self._step(max(nodes, self.floor))
        return seconds + sum(self.costs.draft(method, share * count, length) for method, share in methods.items())

    @cached_property
    def _step(self) -> Callable[[int], float]:
        """Seconds of the forward with so many draft nodes a row, which is asked for every number of rows."""
        size = len(self.rows)
        context = sum(row.context for row in self.rows) / size
        return cache(lambda nodes: self.costs.step(size * (1 + nodes) + self.beside, size, context))


def allocate(
    gains: Sequence[Sequence[float]], base: float, price: Callable[[int, int], float], margin: float = MARGIN
) -> tuple[int, frozenset[int]]:
    """Length of the paths and the rows that draft; (0, none) if that does not pay.

    Exact: for one length and one number of rows, the rows that gain most are the best.

    Args:
        gains: per row, guesses expected to come true with paths of 1, 2, .. tokens; the row has no longer ones, and
            an empty sequence never drafts.
        base: tokens of the step without any of these drafts.
        price: seconds of a step in which `rows` rows have paths of `length` tokens: price(length, rows).
        margin: how many times faster than without drafts it must be.
    """
    best, choice = base / price(0, 0) * margin, (0, frozenset[int]())
    for length in range(1, max(map(len, gains), default=0) + 1):
        value = {i: row[min(length, len(row)) - 1] for i, row in enumerate(gains) if row}
        order = sorted(value, key=lambda i: -value[i])
        for rows, total in enumerate(accumulate(value[i] for i in order), start=1):
            rate = (base + total) / price(length, rows)
            if rate > best:
                best, choice = rate, (length, frozenset(order[:rows]))
    return choice
