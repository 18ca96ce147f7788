"""Cost model of a step in seconds: an initial measurement, corrected by the times of later steps.

Corrections are factors by number of tokens, so that effects that the initial measurement misses are learned for the
sizes that occur. Decisions depend on ratios of costs only. The module reads no clock; times are arguments.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import NamedTuple

from sametoken.control.acceptance import PRIOR

FEED = 64  # tokens read by a drafter that count as one more observation of the cost of reading
FOLLOWED = 1.0 / (1.0 + PRIOR)  # part of an error that one more observation corrects
STRIDE = 0.4  # bound of the log error of a slow observation: a preempted process is not a change of cost


class Measured(NamedTuple):
    """Initial measurement; all values are seconds.

    A draft for n rows costs `first[method][n] + levels * level[method][n]`.

    Attributes:
        step: target forward, verification and commit by number of tokens, without `row` and `key`.
        row: cost of each row, independent of its number of tokens.
        key: attention of one row to one more token of context.
        first: fixed cost of a draft, by method with a draft model and number of rows.
        level: cost of each draft level, by method with a draft model and number of rows.
        feed: cost of reading one context token, by method with a draft model.
    """

    step: Mapping[int, float]
    row: float
    key: float
    first: Mapping[str, Mapping[int, float]]
    level: Mapping[str, Mapping[int, float]]
    feed: Mapping[str, float]


class Curve:
    """Seconds as a non-decreasing, piecewise linear function of a count.

    Kernels take constant time up to some number of rows and more after it, so a straight line does not fit.

    Args:
        points: measured seconds by count, without count 0.
        work: function of the count in which seconds are linear between two points; the identity by default.
    """

    def __init__(self, points: Mapping[int, float], work: Callable[[float], float] = float) -> None:
        counts = sorted(points)
        self._work, self._counts = work, [work(count) for count in counts]
        self._seconds = list(accumulate((max(1e-9, points[count]) for count in counts), max))
        (x, end), (y, last) = ([0.0, *each][-2:] for each in (self._counts, self._seconds))
        self._slope = (last - y) / (end - x)

    def __call__(self, count: float) -> float:
        """Return the seconds for `count`: constant before the first point, with the last slope after the last."""
        work = self._work(count)
        above = bisect(self._counts, work)
        if above == 0:
            return self._seconds[0]
        x, y = self._counts[above - 1], self._seconds[above - 1]
        if above == len(self._counts):
            return y + self._slope * (work - x)
        return y + (self._seconds[above] - y) * (work - x) / (self._counts[above] - x)


class Correction:
    """Logarithms of observed over expected seconds, by powers of 2 of a count.

    A count without observations has the value of the nearest one with some.
    """

    def __init__(self) -> None:
        self._cells: dict[int, tuple[float, float]] = {}  # logarithm; observations, at most `PRIOR`

    def __call__(self, count: float) -> float:
        """Return the logarithm for a count."""
        place = round(math.log2(max(count, 1.0)))
        near = min(self._cells, key=lambda cell: (abs(cell - place), cell), default=None)
        return 0.0 if near is None else self._cells[near][0]

    def learn(self, count: float, error: float) -> bool:
        """Correct a cell by a log error; return True if the cell had `PRIOR` observations before.

        No disturbance makes work faster, so an estimate that exceeds the observation by more than `STRIDE` is corrected
        at once.
        """
        place = round(math.log2(max(count, 1.0)))
        value, seen = self._cells.get(place, (self(count), 0.0))
        at_once = min(0.0, error + STRIDE)
        share = FOLLOWED / 2.0 if seen >= PRIOR else 1.0 / (1.0 + max(seen, 1.0))
        self._cells[place] = value + at_once + (error - at_once) * share, min(PRIOR, seen + 1.0)
        return seen >= PRIOR


class Costs:
    """Cost estimates of the parts of a step, in seconds.

    Args:
        measured: initial measurement.
        work: work of a forward by number of tokens, as in `Curve`.
    """

    def __init__(self, measured: Measured, work: Callable[[float], float] = float) -> None:
        self._step = Curve(measured.step, work)
        self._row, self._key = measured.row, measured.key
        self._first = {method: Curve(points) for method, points in measured.first.items()}
        self._level = {method: Curve(points) for method, points in measured.level.items()}
        self._feed = dict(measured.feed)
        self._steps, self._drafts = Correction(), dict[str, Correction]()
        self._pace = 0.0  # logarithm of a common slowdown of the host since the measurement

    def step(self, nodes: float, rows: int, context: float, beside: int = 0) -> float:
        """Seconds of a target forward that decodes and verifies, without drafting.

        The time of the prompt tokens themselves is not counted, but draft tokens can cost more in a forward that is
        already large.

        Args:
            nodes: draft tokens over all rows.
            rows: decoding rows.
            context: mean number of context tokens per row.
            beside: prompt tokens in the same forward.
        """
        seconds = self._step(rows + nodes) + (self._row + self._key * context) * rows
        alone, together = (self._step(tokens + nodes) - self._step(tokens) for tokens in (rows, rows + beside))
        dearer = max(0.0, together - alone)
        return (seconds * math.exp(self._steps(rows + nodes)) + dearer) * math.exp(self._pace)

    # A draft takes (first + the sum of its levels) * factor. A number of rows below 1 is a probability of one row. A
    # method without measurement costs nothing until it was observed.

    def first(self, method: str, rows: float) -> float:
        """Fixed seconds of a draft for `rows` rows, uncorrected."""
        return self._first[method](max(rows, 1.0)) * min(rows, 1.0) if method in self._first else 0.0

    def level(self, method: str, rows: float) -> float:
        """Seconds of one draft level for `rows` rows, uncorrected."""
        return self._level[method](max(rows, 1.0)) * min(rows, 1.0) if method in self._level else 0.0

    def factor(self, method: str, rows: float) -> float:
        """Correction factor of a draft for `rows` rows."""
        return math.exp(self._of(method)(rows) + self._pace)

    def draft(self, method: str, rows: float, levels: int) -> float:
        """Seconds of a draft with paths of `levels` tokens for `rows` rows."""
        if not levels:
            return 0.0
        return (self.first(method, rows) + levels * self.level(method, rows)) * self.factor(method, rows)

    def _of(self, method: str) -> Correction:
        return self._drafts.setdefault(method, Correction())

    def feed(self, method: str, tokens: int) -> float:
        """Seconds in which a draft model reads `tokens` context tokens."""
        return self._feed.get(method, 0.0) * tokens

    def saw_feed(self, method: str, tokens: int, seconds: float) -> None:
        """Record the seconds in which a draft model read `tokens` context tokens."""
        before = self._feed.get(method, seconds / tokens)
        share = 1.0 - (1.0 - FOLLOWED) ** (1 + tokens // FEED)
        self._feed[method] = before + (seconds / tokens - before) * share

    def saw_draft(self, method: str, rows: int, levels: int, seconds: float) -> None:
        """Record the seconds of a draft with paths of `levels` tokens for `rows` rows."""
        if method not in self._first:
            self._first[method] = Curve({rows: seconds})
        error = math.log(max(seconds, 1e-9) / self.draft(method, rows, levels))
        self._of(method).learn(rows, min(STRIDE, error))

    def saw_step(self, nodes: int, rows: int, context: float, seconds: float) -> None:
        """Record the seconds of a step without prompts; drafting is not counted.

        Args:
            nodes: draft tokens over all rows.
            rows: decoding rows.
            context: mean number of context tokens per row.
            seconds: duration of the step.
        """
        # Preemption makes a step slower, nothing makes it faster: only slow errors are bounded.
        error = min(STRIDE, math.log(max(seconds, 1e-9) / self.step(nodes, rows, context)))
        # In a cell with enough observations, half of the error counts as a slowdown of the host and half as an error of
        # the cell. In other cells the initial measurement can be wrong, so only the cell is corrected.
        if self._steps.learn(rows + nodes, error):
            self._pace += max(error, -STRIDE) / 2.0 * FOLLOWED
