"""The rows of one step, what it costs for any drafts of them, and what each of their drafters is expected to bring.

Arithmetic on counts and seconds. Legend: R rows, L longest path, K guesses of a list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sametoken.control.acceptance import Acceptance, Floats, united
from sametoken.control.cost import Costs
from sametoken.control.worth import Time

Whole = NDArray[np.int64]
POWER = 2.0  # of the mean over rows of the time of a token: 1 is their average, more heeds the slowest rows more

SAVING = 0.02  # of the time of its row's tokens that a guess must save to be made, and a further drafter to be asked


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


class RequestedDraft(NamedTuple):
    """A draft of at most `limit` tokens on a path; why not, if there is none.

    Those of `methods` that guess on the host are all asked, and their guesses united. A model is asked if they have
    none, or, where the draft is `joined`, always.

    Beside the tokens of a chain as many as `siblings` more may stand.

    Reasons: "end" of the request, "batch" too large for the schedule, "threshold" missed for good, "gain" too small,
    "recall" of what a step without drafts costs.
    """

    limit: int
    methods: tuple[str, ...]
    reason: str = ""
    joined: bool = False
    siblings: int = 0


NO_GAIN, RECALL = RequestedDraft(0, (), "gain"), RequestedDraft(0, (), "recall")


class Ways(NamedTuple):
    """How each row drafts if it does.

    Attributes:
        methods, joined: [R] whom it asks, see `RequestedDraft`. `parts`: [R] of how many of them nodes are verified.
        gains: [R, L] guesses expected to come true with paths of 1, 2, .. tokens; beyond a row's longest no more.
        shares: by method, how often each row asks it, [R].
        kept: by method, how often a guess that may be made at each place is verified, [1 + L], the first always.
        siblings: by method, how many more are verified beside each of them.
    """

    methods: Sequence[tuple[str, ...]]
    joined: Sequence[bool]
    parts: Whole
    gains: Floats
    shares: Mapping[str, Floats]
    kept: Mapping[str, Floats]
    siblings: Mapping[str, float]


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

    def _expected(self, nodes: Floats) -> Floats:
        """The same for expected counts of draft tokens."""
        counts = np.arange(int(nodes.max(initial=0.0)) + 2)
        found: Floats = np.interp(nodes, counts, self._steps(counts))
        return found

    def prices(self, ways: Ways, row: Whole, place: Whole) -> Floats:
        """Seconds of the steps that may make the first 0, 1, .. K guesses of a list: of these rows, at these places."""
        nodes, drafts = np.zeros((2, len(row) + 1))
        levels = np.arange(place.max(initial=0) + 1)
        for method, share in ways.shares.items():
            asked = share[row]
            each = (1.0 + ways.siblings.get(method, 0.0)) * ways.kept[method][1 + place]
            nodes[1:] += np.cumsum(asked * each * np.diff(self._nodes)[place])
            active = np.zeros((len(row) + 1, len(levels)))
            made = asked * ways.kept[method][place]  # what follows a guess that was not worth it is not made
            active[1:] = np.cumsum((place[:, None] == levels) * made[:, None], axis=0)
            drafts += self._costs.drafts(method, active)
        if not self._ragged:
            nodes[1:] = np.maximum.accumulate(ways.parts[row] * self._nodes[place + 1]) * len(self.rows)
        seconds: Floats = drafts + self._expected(nodes)
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
        # Costs rise ever faster with tokens. Where what was learned says otherwise, which noise does, their mean holds.
        each = max((many - few) / (more - less), (many - self.plain) / more, 0.0)
        times = {}
        for method, share in ways.shares.items():
            count = max(1.0, float(share[on].sum()))
            rows = np.array([[count, count], [count, 0.0], [2 * count, 2 * count], [2 * count, 0.0]])
            drafts = self._costs.drafts(method, rows)
            level = float(drafts[0] - drafts[1])
            row = max(0.0, float(drafts[2] - drafts[3]) - level) / count
            times[method] = Time(rate * each, rate * row, rate * max(0.0, level - row * count))
        return weights, times

    def debt(self, method: str, i: int) -> float:
        """Seconds to read what a row's draft model has yet to read."""
        return self._costs.feed(method, self.rows[i].backlog)

    def ways(
        self, methods: Mapping[str, Acceptance], runs_model: Callable[[str], bool],
        spread: Callable[[Sequence[str]], float],
    ) -> list[Ways]:  # fmt: skip
        """The best way of each row to draft, and where that asks a model, the best without any.

        Args:
            spread: of methods whose guesses are united, see `Overlap`.
        """
        names, count = sorted(methods, key=runs_model), len(self.rows)
        holds = np.zeros((len(names), count, 1 + self.longest))  # chances: a draft is there, it holds 1, 2, .. tokens
        for n, method in enumerate(names):
            acceptance = methods[method]
            having = [i for i in self.free if method in self.rows[i].methods]
            chances = acceptance.chances([self.rows[i].id for i in having])[:, : self.longest + 1]
            if runs_model(method):
                chances[:, :1] = self._left(method, having)
            paths = np.cumprod(chances, axis=1)
            paths[:, 1:] -= acceptance.saved * np.diff(paths, axis=1)  # a sibling makes up for the first wrong guess
            holds[n, having] = paths
        ways, held_by = _ways(list(map(runs_model, names))), []
        parts = np.array([len(way) for way, _ in ways])
        asks = np.zeros((len(ways), len(names), count))  # how often each row asks each method
        for w, (way, joined) in enumerate(ways):
            asks[w, way] = 1.0
            later = [] if joined or len(way) == 1 or not runs_model(names[way[-1]]) else way[-1:]
            first = way[: len(way) - len(later)]
            held = holds[first[0]] if len(first) == 1 else united(holds[first], spread([names[n] for n in first]))
            for n in later:
                asks[w, n], parts[w] = 1.0 - held[:, 0], len(first)
                held = held + (1.0 - held[:, :1]) * holds[n]
            held_by.append(held[:, 1:])
        last = np.minimum(np.arange(1, self.longest + 1), self._limits[:, None])
        gains = np.maximum(0.0, np.take_along_axis(np.cumsum(held_by, axis=2), last[None] - 1, axis=2))
        gains[:, self._limits == 0] = 0.0
        kept = {name: np.append(1.0, methods[name].kept[1:]) for name in names}
        siblings = {name: methods[name].siblings for name in names}

        def best(waits: Floats) -> Ways:
            at, row = np.argmin(waits, axis=0), np.arange(count)
            chosen = [ways[n] for n in at.tolist()]
            asked = [tuple(names[n] for n in way) for way, _ in chosen]
            shares = {name: asks[at, n, row] for n, name in enumerate(names) if any(name in each for each in asked)}
            return Ways(asked, [each for _, each in chosen], parts[at], gains[at, row], shares, kept, siblings)

        if len(ways) == 1:
            return [best(np.zeros((1, count)))]
        lacks = np.einsum("wnr,nr->wr", asks > 0.0, holds[:, :, 0] == 0.0) > 0.0
        margin = np.array([[1.0 + SAVING * len(way)] for way, _ in ways])
        waits = self._waits(gains, asks, kept, siblings) * np.where(lacks, np.inf, margin)
        found = [best(waits)]
        if any(runs_model(method) for method in found[0].shares) and not all(map(runs_model, names)):
            found.append(best(np.where([[runs_model(names[way[-1]])] for way, _ in ways], np.inf, waits)))
        return found

    def _waits(self, gains: Floats, asks: Floats, kept: Mapping[str, Floats], siblings: Mapping[str, float]) -> Floats:
        """[ways, R] the least wait for a token if all rows were like this one, over the lengths of its paths."""
        count = len(self.rows)
        more = np.diff(self._nodes)
        nodes = np.array([(1.0 + siblings[m]) * np.cumsum(kept[m][1 : self.longest + 1] * more) for m in kept])
        levels = count * np.tri(self.longest)
        drafts = np.array([self._costs.drafts(method, levels) for method in kept])
        steps = self._expected(count * np.einsum("wnr,nl->wrl", asks, nodes))
        waits: Floats = ((steps + np.einsum("wnr,nl->wrl", asks, drafts)) / (1.0 + gains)).min(axis=2)
        return waits

    def _left(self, method: str, places: Sequence[int]) -> Floats:
        """[.., 1] the share of their gains that is left to rows after reading what their model has yet to read."""
        token = self.plain / len(self.rows)
        debts = [self.debt(method, i) / token / max(1, self.rows[i].room) for i in places]
        return 1.0 / (1.0 + np.array(debts, ndmin=2).T)


def _ways(models: Sequence[bool]) -> list[tuple[list[int], bool]]:
    """All ways to ask some of these methods, of which at most one, the last, runs a model; and whether it is joined."""
    groups = [list(group) for size in range(len(models)) for group in combinations(range(len(models)), 1 + size)]
    asked = [(group, [models[n] for n in group]) for group in groups]
    return [(group, joined) for group, runs in asked if sum(runs) < 2 for joined in {False, len(set(runs)) == 2}]
