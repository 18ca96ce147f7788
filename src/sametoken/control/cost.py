"""What a step costs in seconds: measured once, then corrected by every step seen. No clock: times come in as numbers.

Decisions depend on ratios only. A step is corrected as a whole, by its rows and by the tokens or levels of its drafts,
so that whatever a first measurement leaves out is learned where it matters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sametoken.control.acceptance import Floats

STRIDE = 0.4  # most that one observation may be too slow, as a logarithm: a stolen time slice is no news
FOLLOW = 0.1  # share of an error that a cell learns once it is known, and that goes to the pace of the machine
KNOWN = 8.0  # observations after which a cell is known
HOST_SECONDS = 30e-6  # a guess on the host, until one was seen
CELLS = 14  # of rows and of draft tokens, each for twice as many as the one before


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
        points: seconds by count; 0 belongs to no point.
        work: what grows in proportion with seconds between two points, the count itself unless given.
    """

    def __init__(self, points: Mapping[int, float], work: Callable[[float], float] = float) -> None:
        self._work, counts = work, sorted(points)
        self._counts = np.array([work(count) for count in counts])
        self._seconds = np.maximum.accumulate([max(1e-9, points[count]) for count in counts])
        rise = self._counts[-1] - self._counts[-2] if len(counts) > 1 else self._counts[-1]
        before = self._seconds[-2] if len(counts) > 1 else 0.0
        self._slope = (self._seconds[-1] - before) / rise
        self._table = np.zeros(0)

    def __call__(self, counts: Floats) -> Floats:
        """Seconds for each of `counts`; flat before the first knot, the last slope after the last."""
        beyond = np.maximum(0.0, counts - self._counts[-1])
        found: Floats = np.interp(counts, self._counts, self._seconds) + self._slope * beyond
        return found

    def whole(self, counts: NDArray[np.int64]) -> Floats:
        """The same for whole numbers, by their work."""
        found: Floats = self._up_to(int(counts[-1] if len(counts) else 0))[counts]
        return found

    def at(self, count: int) -> float:
        """The same for one whole number."""
        return self._up_to(count).item(count)

    def _up_to(self, most: int) -> Floats:
        if most >= len(self._table):
            self._table = self(np.array([self._work(count) for count in range(2 * most + 2)]))
        return self._table


class Correction:
    """Logarithms of seconds seen over seconds expected, in cells of rows and of a second count, both by powers of 2.

    A cell that was never seen follows those around it, the nearest most.
    """

    def __init__(self) -> None:
        self._value, self._seen = np.zeros((2, CELLS, CELLS))
        self._places = np.arange(CELLS, dtype=float)
        self._near = 0.5 ** np.abs(self._places[:, None] - self._places)
        self._rows: dict[int, Floats] = {}

    def __call__(self, rows: int, counts: Floats) -> Floats:
        """The correction for each of `counts` beside so many rows."""
        cell = _cell(rows)
        if cell not in self._rows:
            weight = self._near[cell] @ self._seen @ self._near + 1e-3
            around = self._near[cell] @ (self._seen * self._value) @ self._near / weight
            known = np.minimum(1.0, self._seen[cell])
            self._rows[cell] = known * self._value[cell] + (1.0 - known) * around
        found: Floats = np.interp(np.log2(1.0 + counts), self._places, self._rows[cell])
        return found

    def at(self, rows: int, count: int) -> float:
        """The correction for one count."""
        cell, at = _cell(rows), min(math.log2(1.0 + count), CELLS - 1.0)
        low, part = int(at), at % 1.0
        high = low + (part > 0.0)
        if self._seen.item(cell, low) < 1.0 or self._seen.item(cell, high) < 1.0:
            return self(rows, np.array([count])).item()
        return (1.0 - part) * self._value.item(cell, low) + part * self._value.item(cell, high)

    def learn(self, rows: int, count: int, error: float) -> bool:
        """Corrects the cells around for an error; whether they were known before.

        Nothing makes work faster than it is: by how much it is far too fast is corrected at once.
        """
        cell, at = _cell(rows), min(math.log2(1.0 + count), CELLS - 1.001)
        parts = ((int(at), 1.0 - at % 1.0), (int(at) + 1, at % 1.0))
        known = all(self._seen.item(cell, place) >= KNOWN for place, part in parts if part > 0.1)
        at_once = min(0.0, error + STRIDE)
        for place, part in parts:
            seen = self._seen.item(cell, place)
            if not seen and not part:
                continue
            if not seen:  # begins where its neighbours let expect it
                self._value[cell, place] = self(rows, np.array([2.0**place - 1.0])).item()
            self._seen[cell, place] = min(KNOWN, seen + part)
            self._value[cell, place] += at_once + (error - at_once) * part * max(FOLLOW, 1.0 / (1.0 + seen))
        self._rows.clear()
        return known


def _cell(rows: float) -> int:
    return min(round(math.log2(max(rows, 1))), CELLS - 1)


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
        self._steps, self._drafts = Correction(), dict[str, Correction]()
        self._pace = 0.0  # logarithm of how much slower everything is than when it was measured

    def steps(self, nodes: NDArray[np.int64], rows: int, beside: int, context: float) -> Floats:
        """Steps without their drafts: forwards of `rows` decoding rows after `context` tokens on average, of `beside`
        other tokens, and of each of these counts of draft tokens in rising order.
        """
        added = (self._row + self._key * context) * rows
        seconds = self._step.whole(rows + beside + nodes) + added
        return seconds * np.exp(self._steps(rows, nodes.astype(float)) + self._pace)

    def drafts(self, method: str, active: Floats) -> Floats:
        """Guessing with so many rows at each level, [.., levels]; less than one is a chance that there is one."""
        rows, likely = active[..., 0], np.minimum(active, 1.0)
        first, level, correction = self._of(method)
        seconds = first(rows) * likely[..., 0] + (level(active) * likely).sum(-1)
        most = int(rows.max(initial=1.0))
        found: Floats = seconds * np.exp(correction(most, (active > 0).sum(-1).astype(float)) + self._pace)
        return found

    def _of(self, method: str) -> tuple[Curve, Curve, Correction]:
        """What the first guess costs and what each level does, by rows, and their correction."""
        if method not in self._drafts:
            self._drafts[method] = Correction()
            self._first.setdefault(method, Curve({1: HOST_SECONDS, 2: 2 * HOST_SECONDS}))
            self._level.setdefault(method, Curve({1: 0.0}))
        return self._first[method], self._level[method], self._drafts[method]

    def step(self, tokens: int, rows: int, context: float) -> float:
        """A step without its draft: `tokens` in the forward, `rows` decoding after `context` tokens on average."""
        seconds = self._step.at(tokens) + (self._row + self._key * context) * rows
        return seconds * math.exp(self._steps.at(rows, tokens - rows) + self._pace)

    def draft(self, method: str, rows: int, levels: int) -> float:
        """Guessing paths of `levels` tokens for `rows` rows."""
        if not rows or not levels:
            return 0.0
        first, level, correction = self._of(method)
        return (first.at(rows) + levels * level.at(rows)) * math.exp(correction.at(rows, levels) + self._pace)

    def feed(self, method: str, tokens: int) -> float:
        """Reading `tokens` tokens before the first guess."""
        return self._feed.get(method, 0.0) * tokens

    def saw_draft(self, method: str, rows: int, levels: int, seconds: float) -> None:
        """Guessing paths of `levels` tokens for `rows` rows took `seconds`."""
        error = math.log(max(seconds, 1e-9) / self.draft(method, rows, levels))
        self._drafts[method].learn(rows, levels, min(STRIDE, error))

    def saw_step(self, nodes: int, rows: int, context: float, seconds: float) -> None:
        """A step of `rows` rows and so many draft tokens, without prompts, took `seconds` beside its drafts."""
        # Nothing makes work faster than it is, but a stolen time slice may make it slower.
        error = min(STRIDE, math.log(max(seconds, 1e-9) / self.step(rows + nodes, rows, context)))
        # The same work again that takes longer is the machine's pace; but a first measurement may have been wrong.
        if self._steps.learn(rows, nodes, error):
            self._pace += FOLLOW * error
