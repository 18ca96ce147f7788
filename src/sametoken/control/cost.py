"""What a step costs in seconds: measured once, then corrected by every step seen. No clock: times come in as numbers.

Decisions depend on ratios only. What changes while the work stays the same is the pace of the machine (another process,
heat) and goes into one factor; what changes with the work bends the curves. All of it in bounded strides.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import NamedTuple

STRIDE = 0.4  # most that one observation may be too slow, as a logarithm: a stolen time slice is no news
FOLLOW, BEND = 0.2, 0.2  # shares of an error that go to the pace, and to a curve that has been seen often
SURE = 8.0  # corrections after which a knot is believed
HOST_SECONDS = 30e-6  # a guess on the host, until one was seen


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
    """Seconds as a function of a count: linear between what was measured, never falling.

    Kernels are flat up to some row count and then rise, which no straight line says.

    Args:
        points: seconds by count.
        work: what grows in proportion with seconds between two points, the count itself unless given.
    """

    def __init__(self, points: Mapping[int, float], work: Callable[[float], float] = float) -> None:
        self._counts, self._work = sorted(points), work
        self._seconds: list[float] = []
        self._seen = [0.0] * len(self._counts)  # what a knot has learned since
        for count in self._counts:
            below = self._seconds[-1] if self._seconds else 1e-9
            self._seconds.append(max(below, points[count]))

    def __call__(self, count: float) -> float:
        """Seconds for `count`; flat before the first knot, the last slope after the last."""
        counts, seconds = self._counts, self._seconds
        if count <= counts[0] or len(counts) == 1:
            return seconds[0] * max(1.0, count / counts[0]) if len(counts) == 1 else seconds[0]
        i = min(bisect_left(counts, count), len(counts) - 1)
        share = self._share(count, counts[i - 1], counts[i])
        return seconds[i - 1] + share * (seconds[i] - seconds[i - 1])

    def _share(self, count: float, below: int, above: int) -> float:
        """Where `count` lies between two counts: 0 at the lower one, 1 at the upper one."""
        begin, end = self._work(below), self._work(above)
        return (self._work(count) - begin) / (end - begin)

    def known(self, count: float) -> bool:
        """Whether the knots beside `count` have been corrected often enough to be believed."""
        return all(self._seen[knot] >= SURE for knot, part in self._parts(count).items() if part)

    def _parts(self, count: float) -> dict[int, float]:
        """The knots beside `count`, by place, and the seconds that each contributes there."""
        counts, seconds = self._counts, self._seconds
        above = min(bisect_left(counts, count), len(counts) - 1)
        below = max(0, above - 1)
        place = min(1.0, max(0.0, self._share(count, counts[below], counts[above]))) if above > below else 1.0
        return {below: (1.0 - place) * seconds[below], above: place * seconds[above]}

    def bend(self, count: float, error: float) -> None:
        """Corrects the knots beside `count` for a logarithmic error; the curve goes on rising.

        A knot's share is its part in the sum, less where it has been seen often: what plain steps
        cost is well known when a draft is first timed.
        """
        seconds, parts = self._seconds, self._parts(count)
        blame = {knot: part / (1.0 + min(SURE, self._seen[knot])) for knot, part in parts.items()}
        for knot, part in blame.items():
            weight = part / sum(blame.values())
            self._seen[knot] += weight
            seconds[knot] *= math.exp(error * weight * max(BEND, 1.0 / (2.0 + self._seen[knot])))
        for i in range(min(parts) - 1, -1, -1):
            seconds[i] = min(seconds[i], seconds[i + 1])
        for i in range(min(parts) + 1, len(seconds)):
            seconds[i] = max(seconds[i], seconds[i - 1])


class Costs:
    """Seconds of the parts of a step.

    Args:
        measured: what to begin with.
        work: of a forward of so many tokens, as in `Curve`.
    """

    def __init__(self, measured: Measured, work: Callable[[float], float] = float) -> None:
        self._step = Curve(measured.step, work)
        self._row, self._key = measured.row, measured.key
        self._first = {method: Curve(points) for method, points in measured.first.items()}
        self._level = {method: Curve(points) for method, points in measured.level.items()}
        self._feed = dict(measured.feed)
        self._host: dict[str, float] = {}
        self._other = 0.0  # per decoding row: planning, text, bookkeeping
        self._pace = 0.0  # logarithm of how much slower everything is than when it was measured
        self._last = (0, 0)  # tokens and rows of the last forward

    def step(self, tokens: float, rows: int, context: float) -> float:
        """A step without its draft: `tokens` in the forward, `rows` decoding after `context` tokens on average."""
        return self._forward(tokens, rows, context) + self._other * rows

    def _forward(self, tokens: float, rows: int, context: float) -> float:
        return self._step(tokens) + (self._row + self._key * context) * rows

    def draft(self, method: str, rows: float, levels: int) -> float:
        """Guessing paths of `levels` tokens for `rows` rows."""
        if rows <= 0 or levels <= 0:
            return 0.0
        first, level = self.levels(method, rows)
        return first + levels * level

    def levels(self, method: str, rows: float) -> tuple[float, float]:
        """Of guessing for more than 0 rows: what it costs once, and for each level."""
        if method not in self._first:
            return self._host.get(method, HOST_SECONDS) * rows, 0.0
        return self._first[method](rows), self._level[method](rows)

    def feed(self, method: str, tokens: int) -> float:
        """Reading `tokens` tokens before the first guess."""
        return self._feed.get(method, 0.0) * tokens

    def saw_step(self, tokens: int, rows: int, context: float, seconds: float, other: float) -> None:
        """A forward of `tokens` took `seconds`, and the host `other` seconds beside it."""
        expected = self._forward(tokens, rows, context)
        error = _bounded(math.log(max(seconds, 1e-9) / expected) - self._pace)
        # The same work again that takes longer is the machine's pace; but a first measurement may have been wrong.
        if (tokens, rows) == self._last and self._step.known(tokens):
            self._pace += FOLLOW * error
        else:
            self._step.bend(tokens, error)
        self._last = tokens, rows
        normal = other * math.exp(-self._pace) / rows
        most = math.exp(STRIDE) * self._other if self._other else normal
        self._other += FOLLOW * (min(normal, most) - self._other)

    def saw_draft(self, method: str, rows: int, levels: int, seconds: float) -> None:
        """Guessing took `seconds`."""
        if method not in self._first:
            seen = seconds * math.exp(-self._pace) / rows
            known = self._host.get(method, HOST_SECONDS)
            follow = FOLLOW if seen > known else 0.5
            self._host[method] = known + follow * (min(seen, math.exp(STRIDE) * known) - known)
            return
        error = _bounded(math.log(max(seconds, 1e-9) / self.draft(method, rows, levels)) - self._pace)
        self._first[method].bend(rows, error)
        self._level[method].bend(rows, error)


def _bounded(error: float) -> float:
    """An error that a stolen time slice may have made too large; nothing makes work faster than it is."""
    return min(STRIDE, error)
