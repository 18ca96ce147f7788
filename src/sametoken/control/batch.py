"""The rows of one step, what it costs for any drafts of them, and what each of their drafters is expected to bring.

Arithmetic on counts and seconds. Legend: R rows, L longest path, K guesses of a list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sametoken.control.acceptance import Acceptance, Floats
from sametoken.control.cost import Costs
from sametoken.control.worth import Time

Whole = NDArray[np.int64]
POWER = 2.0  # of the mean over rows of the time of a token: 1 is their average, more heeds the slowest rows more


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


class Ways(NamedTuple):
    """How each row drafts if it does.

    Attributes:
        methods: [R] what it asks, in order.
        gains: [R, L] guesses expected to come true with paths of 1, 2, .. tokens; beyond a row's longest no more.
        shares: by method, how often each row asks it, [R].
        kept: by method, how often a guess that may be made at each place is verified, [1 + L], the first always.
    """

    methods: Sequence[tuple[str, ...]]
    gains: Floats
    shares: Mapping[str, Floats]
    kept: Mapping[str, Floats]


class ChosenLengths(NamedTuple):
    """How far each row drafts.

    Attributes:
        lengths: [R] tokens on its paths, 0 for none.
        wait: seconds that a token takes: of rows w, (sum of w ** `POWER`) ** (1 / `POWER`).
        seconds: of the step.
    """

    lengths: Whole
    wait: float
    seconds: float


class StepBatch:
    """The rows of one step and what it costs.

    Args:
        rows: all of the step.
        free: places of those whose drafts are chosen.
        beside: other tokens that the forward computes: prompts, and drafts that are not chosen here.
        nodes: [1 + L] of the widest draft with paths of 0, 1, .. L tokens.
        ragged: whether a forward computes each row's own nodes; otherwise all compute as many as the widest draft.

    Attributes:
        plain: seconds of the step without the drafts that are chosen.
    """

    def __init__(
        self, rows: Sequence[DecodingRow], free: Sequence[int], beside: int, nodes: Sequence[int], costs: Costs,
        ragged: bool,
    ) -> None:  # fmt: skip
        self.rows, self.free, self.longest = rows, free, len(nodes) - 1
        self._beside, self._nodes, self._costs, self._ragged = beside, np.array(nodes), costs, ragged
        self._context = sum(row.context for row in rows) / len(rows)
        self._limits = np.zeros(len(rows), dtype=np.int64)
        self._limits[free] = [min(rows[i].limit, self.longest) for i in free]
        self.plain = float(self._steps(np.zeros(1, dtype=np.int64))[0])

    def _steps(self, nodes: Whole) -> Floats:
        return self._costs.steps(nodes, len(self.rows), self._beside, self._context)

    def prices(self, ways: Ways, row: Whole, place: Whole) -> Floats:
        """Seconds of the steps that may make the first 0, 1, .. K guesses of a list: of these rows, at these places."""
        nodes, drafts = np.zeros((2, len(row) + 1))
        levels = np.arange(place.max(initial=0) + 1)
        for method, share in ways.shares.items():
            asked = share[row]
            nodes[1:] += np.cumsum(asked * ways.kept[method][1 + place] * np.diff(self._nodes)[place])
            active = np.zeros((len(row) + 1, len(levels)))
            made = asked * ways.kept[method][place]  # what follows a guess that was not worth it is not made
            active[1:] = np.cumsum((place[:, None] == levels) * made[:, None], axis=0)
            drafts += self._costs.drafts(method, active)
        if not self._ragged:
            nodes[1:] = self._nodes[np.maximum.accumulate(place) + 1] * len(self.rows)
        seconds: Floats = drafts + self._steps(np.rint(nodes).astype(np.int64))
        return seconds

    def outcome(self, ways: Ways, lengths: Sequence[int]) -> tuple[float, float]:
        """The wait for a token (see `ChosenLengths`) and the step's seconds, with such paths in the free rows."""
        chosen = np.zeros(len(self.rows), dtype=np.int64)
        chosen[self.free] = np.array(lengths)[self.free]
        row, place = np.nonzero(np.arange(self.longest) < chosen[:, None])
        seconds = float(self.prices(ways, row, place)[-1])
        gains = np.where(chosen > 0, ways.gains[np.arange(len(chosen)), chosen - 1], 0.0)
        return seconds * float(np.sum((1.0 + gains) ** -POWER)) ** (1.0 / POWER), seconds

    def worth(self, ways: Ways, choice: ChosenLengths) -> tuple[dict[int, float], dict[str, Time]]:
        """What a guess that comes true is worth, by request, and the worth of time by drafter, in the same unit.

        The unit is what makes the sum over rows of the time of a token less, as a share of it.
        """
        on = np.flatnonzero(choice.lengths)
        gains = ways.gains[on, choice.lengths[on] - 1]
        weights = {
            self.rows[i].id: (1.0 + gain) ** -(1.0 + POWER) for i, gain in zip(on.tolist(), gains.tolist(), strict=True)
        }
        rate = (choice.wait / choice.seconds) ** POWER / choice.seconds
        nodes = int(self._nodes[choice.lengths].sum())
        less, more = nodes // 2, 2 * nodes
        few, many = self._steps(np.array([less, more]))
        times = {}
        for method, share in ways.shares.items():
            count = max(1.0, float(share[on].sum()))
            rows = np.array([[count, count], [count, 0.0], [2 * count, 2 * count], [2 * count, 0.0]])
            drafts = self._costs.drafts(method, rows)
            level = float(drafts[0] - drafts[1])
            row = max(0.0, float(drafts[2] - drafts[3]) - level) / count
            times[method] = Time(rate * (many - few) / (more - less), rate * row, rate * max(0.0, level - row * count))
        return weights, times

    def debt(self, method: str, i: int) -> float:
        """Seconds to read what a row's draft model has yet to read."""
        return self._costs.feed(method, self.rows[i].backlog)

    def ways(self, methods: Mapping[str, Acceptance], runs_model: Callable[[str], bool]) -> Ways:
        """The best way of each row to draft: with one of these methods, or with one on the host and else a model."""
        count, models = len(self.rows), [method for method in methods if runs_model(method)]
        gains, offers = np.zeros((2, len(methods), count, self.longest))
        offers = offers[:, :, :1]
        names = list(methods)
        for n, (method, acceptance) in enumerate(methods.items()):
            having = [i for i in self.free if method in self.rows[i].methods]
            chances = acceptance.chances([self.rows[i].id for i in having])
            gains[n, having] = np.cumsum(np.cumprod(chances[:, 1 : self.longest + 1], axis=1), axis=1)
            offers[n, having] = self._left(method, having) if method in models else chances[:, :1]
        hosts = [n for n, name in enumerate(names) if name not in models]
        ways = [(h, m) for h in hosts for m in range(len(names)) if m not in hosts] + [(n,) for n in range(len(names))]
        each = np.stack([
            offers[way[0]] * gains[way[0]]
            + (1.0 - offers[way[0]]) * (offers[way[1]] * gains[way[1]] if len(way) > 1 else 0.0)
            - (offers[way, :] == 0.0).any(0)
            for way in ways
        ])  # fmt: skip
        best = np.argmax(each[:, :, -1], axis=0)
        shares = {method: np.zeros(count) for method in methods}
        for n, way in enumerate(ways):
            shares[names[way[0]]] += best == n
            if len(way) > 1:
                shares[names[way[1]]] += (best == n) * (1.0 - offers[way[0], :, 0])
        found = np.concatenate([np.zeros((count, 1)), each[best, np.arange(count)]], axis=1)
        last = np.minimum(np.arange(1, self.longest + 1), self._limits[:, None])
        asked = [tuple(names[m] for m in ways[n]) for n in best]
        found = np.maximum(0.0, found)
        kept = {method: np.append(1.0, acceptance.kept[1:]) for method, acceptance in methods.items()}
        return Ways(asked, np.take_along_axis(found, last, axis=1), shares, kept)

    def _left(self, method: str, places: Sequence[int]) -> Floats:
        """[.., 1] the share of their gains that is left to rows after reading what their model has yet to read."""
        token = self.plain / len(self.rows)
        debts = [self.debt(method, i) / token / max(1, self.rows[i].room) for i in places]
        return 1.0 / (1.0 + np.array(debts, ndmin=2).T)
