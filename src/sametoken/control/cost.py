"""Cost of a step in seconds: measured once, then corrected by every step. No clock: times come in as numbers.

Decisions depend on ratios only. A step is corrected as a whole, by its rows and by the tokens or levels of its drafts,
so that effects outside the first measurement are learned where they matter.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import NamedTuple

from sametoken.control.acceptance import PRIOR

FEED = 64  # tokens that a drafter reads, which count as one more observation of what that costs
STRIDE = 0.4  # most that one observation may be too slow, as a logarithm: a stolen time slice is no news


class Measured(NamedTuple):
    """A first measurement; all values are seconds.

    Attributes:
        step: a forward of the target by tokens in it, verified and committed, without what each row adds:
        row: one row's sequence in it, however few its tokens.
        key: one row's attention to one more token of context.
        first, level: by method that runs a model: a draft of one row count costs `first + levels * level`.
        feed: by such a method: reading one token that it has not read yet.
    """

    step: Mapping[int, float]
    row: float
    key: float
    first: Mapping[str, Mapping[int, float]]
    level: Mapping[str, Mapping[int, float]]
    feed: Mapping[str, float]


class Curve:
    """Seconds as a function of a count: linear between measured points, never falling.

    Kernels are flat up to some row count and then rise, so a straight line does not fit.

    Args:
        points: seconds by count; 0 belongs to no point.
        work: quantity that grows in proportion with seconds between two points, the count itself unless given.
    """

    def __init__(self, points: Mapping[int, float], work: Callable[[float], float] = float) -> None:
        counts = sorted(points)
        self._work, self._counts = work, [work(count) for count in counts]
        self._seconds = list(accumulate((max(1e-9, points[count]) for count in counts), max))
        (x, end), (y, last) = ([0.0, *each][-2:] for each in (self._counts, self._seconds))
        self._slope = (last - y) / (end - x)

    def __call__(self, count: float) -> float:
        """Flat before the first count that was measured, with the last slope after the last."""
        work = self._work(count)
        above = bisect(self._counts, work)
        if above == 0:
            return self._seconds[0]
        x, y = self._counts[above - 1], self._seconds[above - 1]
        if above == len(self._counts):
            return y + self._slope * (work - x)
        return y + (self._seconds[above] - y) * (work - x) / (self._counts[above] - x)


class Correction:
    """Logarithms of seconds seen over seconds expected, in cells of rows and of a second count, both by powers of 2.

    A cell that was never seen has the value of the nearest one.
    """

    def __init__(self) -> None:
        self._cells: dict[tuple[int, int], tuple[float, float]] = {}  # value, and observations up to `PRIOR`
        self._nearest: dict[tuple[int, int], float] = {}

    def __call__(self, rows: float, count: float) -> float:
        """The correction for `rows` rows and a second count."""
        cell = round(math.log2(max(rows, 1.0))), round(math.log2(1.0 + count))
        if cell not in self._nearest:
            far = [(abs(row - cell[0]) + abs(column - cell[1]), row, column) for row, column in self._cells]
            self._nearest[cell] = self._cells[min(far)[1:]][0] if far else 0.0
        return self._nearest[cell]

    def learn(self, rows: float, count: float, error: float, times: int = 1) -> bool:
        """Correct a cell by an error that was seen `times` times; return True if it had enough observations before.

        No disturbance makes work faster, so an estimate that is far too slow is corrected at once.
        """
        cell = round(math.log2(max(rows, 1.0))), round(math.log2(1.0 + count))
        value, seen = self._cells.get(cell, (self(rows, count), 0.0))
        at_once = min(0.0, error + STRIDE)
        share = max(times / (times + max(seen, 1.0)), followed(times)) * (0.5 if seen >= PRIOR else 1.0)
        self._cells[cell] = value + at_once + (error - at_once) * share, min(PRIOR, seen + times)
        self._nearest.clear()
        return seen >= PRIOR


def followed(times: int) -> float:
    """Share of an error that is followed after it was seen `times` times, if the cell has many observations."""
    return 1.0 - (1.0 - 1.0 / (1.0 + PRIOR)) ** times


class Costs:
    """Seconds of the parts of a step.

    Args:
        measured: initial costs.
        work: of a forward of so many tokens, as in `Curve`.
    """

    def __init__(self, measured: Measured, work: Callable[[float], float] = float) -> None:
        self._step = Curve(measured.step, work)
        self._row, self._key = measured.row, measured.key
        self._first = {method: Curve(points) for method, points in measured.first.items()}
        self._level = {method: Curve(points) for method, points in measured.level.items()}
        self._feed = dict(measured.feed)
        self._steps, self._drafts = Correction(), dict[str, Correction]()
        self._pace = 0.0  # logarithm of how much slower everything is than when it was measured

    def step(self, nodes: float, rows: int, context: float, beside: int = 0) -> float:
        """Seconds of a step without its drafts: a forward of `rows` decoding rows after `context` tokens on average,
        and of `nodes` draft tokens. The time of `beside` prompt tokens is not counted, but draft tokens may cost more
        beside them.
        """
        seconds = self._step(rows + nodes) + (self._row + self._key * context) * rows
        alone, together = (self._step(tokens + nodes) - self._step(tokens) for tokens in (rows, rows + beside))
        dearer = max(0.0, together - alone)
        return (seconds * math.exp(self._steps(rows, nodes)) + dearer) * math.exp(self._pace)

    # Of guesses for so many rows; less than one row is a chance that there is one. A method costs nothing until it was
    # seen. A draft takes (first + the sum of its levels) * factor.

    def first(self, method: str, rows: float) -> float:
        """Seconds of the first guess, uncorrected."""
        return self._first[method](max(rows, 1.0)) * min(rows, 1.0) if method in self._first else 0.0

    def level(self, method: str, rows: float) -> float:
        """Seconds of each level, uncorrected."""
        return self._level[method](max(rows, 1.0)) * min(rows, 1.0) if method in self._level else 0.0

    def factor(self, method: str, rows: float) -> float:
        """Correction factor of a draft."""
        return math.exp(self._of(method)(rows, 0) + self._pace)

    def draft(self, method: str, rows: float, levels: int) -> float:
        """Seconds of paths of `levels` tokens for `rows` rows."""
        if not levels:
            return 0.0
        return (self.first(method, rows) + levels * self.level(method, rows)) * self.factor(method, rows)

    def _of(self, method: str) -> Correction:
        return self._drafts.setdefault(method, Correction())

    def feed(self, method: str, tokens: int) -> float:
        """Seconds to read `tokens` tokens before the first guess."""
        return self._feed.get(method, 0.0) * tokens

    def saw_feed(self, method: str, tokens: int, seconds: float) -> None:
        """Record that reading `tokens` tokens took `seconds`."""
        before = self._feed.get(method, seconds / tokens)
        self._feed[method] = before + (seconds / tokens - before) * followed(1 + tokens // FEED)

    def saw_draft(self, method: str, rows: int, levels: int, seconds: float) -> None:
        """Record that drafting paths of `levels` tokens for `rows` rows took `seconds`."""
        if method not in self._first:
            self._first[method] = Curve({rows: seconds})
        error = math.log(max(seconds, 1e-9) / self.draft(method, rows, levels))
        self._of(method).learn(rows, 0, min(STRIDE, error))

    def saw_step(self, nodes: int, rows: int, context: float, seconds: float, times: int = 1) -> None:
        """Record that a step of `rows` rows and `nodes` draft tokens, without prompts, took `seconds` without drafts,
        `times` times.
        """
        # Nothing makes work faster than it is, but a stolen time slice may make it slower.
        error = min(STRIDE, math.log(max(seconds, 1e-9) / self.step(nodes, rows, context)))
        # The same work again that takes longer is half the machine's pace and half news of this work; work that is not
        # known yet may have been measured wrongly at first.
        if self._steps.learn(rows, nodes, error, times):
            self._pace += max(error, -STRIDE) / 2.0 * followed(2 * times)
