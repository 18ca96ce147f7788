"""Greedy choice of the draft tokens of one step, over the rows of a batch.

All candidate guesses are sorted by the decrease of the time per token that each brings; a prefix of this list is
chosen. The probability of a path never grows along it, so the guesses of a row keep their order in the list, and the
best set of n guesses is its first n. The objective is a power mean over rows of the time per token (`POWER`): the
tokens per second of the whole batch would favour rows with accepted guesses at the cost of the others. Pure
arithmetic. Legend: R rows, L length of the longest path in tokens.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Sequence
from itertools import accumulate, chain, combinations, pairwise
from typing import NamedTuple

from sametoken.control.acceptance import BEST, HOPE, Acceptance, united
from sametoken.control.cost import Costs
from sametoken.control.worth import Time

POWER = 2.0  # exponent of the power mean over rows of the time per token: 1 averages, more favours the slowest rows
SAVING = 0.02  # least fraction of the time per token of a row that each of its drafters must save


class DecodingRow(NamedTuple):
    """A row of a batch whose prompt is computed.

    Attributes:
        id: identifier of the request.
        methods: names of the drafters that the row may use.
        limit: longest useful path in tokens.
        adaptive: true if the draft length is chosen here; otherwise it is `limit`.
        context: number of tokens before the pending one.
        backlog: number of tokens that the draft model has not read yet.
        room: expected number of output tokens left.
    """

    id: int
    methods: tuple[str, ...]
    limit: int
    adaptive: bool
    context: int
    backlog: int
    room: float


class RequestedDraft(NamedTuple):
    """Request for a draft, or the reason for none.

    All host drafters of `methods` run, and their guesses are united. A draft model of `methods` runs if the host
    drafters return no guess, or always if the draft is `joined`.

    Attributes:
        limit: longest path in tokens; 0 for no draft.
        methods: names of the drafters.
        reason: reason for no draft: "end" of the request, "batch" too large for the schedule, "threshold" of the
            acceptance gate missed, "gain" too small, "recall" to measure a step without drafts.
        joined: true if the guesses of host drafters and of a draft model are verified in one tree.
        siblings: most tokens of a draft in addition to its chain.
    """

    limit: int
    methods: tuple[str, ...]
    reason: str = ""
    joined: bool = False
    siblings: int = 0

    def within(self, limit: int) -> RequestedDraft:
        """Return the draft with paths of at most `limit` tokens, for a row that can emit no more."""
        if self.limit <= limit:
            return self
        return self._replace(limit=limit) if limit else RequestedDraft(0, (), "end")


NO_GAIN, RECALL = RequestedDraft(0, (), "gain"), RequestedDraft(0, (), "recall")


class Way(NamedTuple):
    """Combination of drafters for a row, with its expected gains.

    Attributes:
        methods: names of the drafters, as in `RequestedDraft`.
        joined: see `RequestedDraft`.
        gains: expected accepted guesses with paths of 1, 2, .. tokens, [L]; constant beyond the limit of the row.
        shares: expected fraction of the steps in which each method runs.
    """

    methods: tuple[str, ...]
    joined: bool
    gains: Sequence[float]
    shares: Sequence[float]


class ChosenLengths(NamedTuple):
    """Draft lengths of the rows of a step.

    Attributes:
        lengths: tokens on the paths of each row, [R]; 0 for no draft.
        wait: the objective: (sum over rows of w ** `POWER`) ** (1 / `POWER`), with w the seconds per token of a row.
        seconds: expected seconds of the step.
    """

    lengths: Sequence[int]
    wait: float
    seconds: float


def cheapest(gains: Sequence[Sequence[float]], plain: float, price: Callable[[int, int], float]) -> ChosenLengths:
    """Find the prefix of the sorted guesses with the least time per token; it is empty if drafts do not pay.

    Args:
        gains: expected accepted guesses with paths of 1, 2, .. tokens, [R][L].
        plain: seconds of the step without draft tokens.
        price: function that adds one guess, given its row and its place on the path, to the step and returns the
            seconds of the step with all guesses added so far.
    """
    saved = []
    for expected in gains:
        waits = [1.0, *((1.0 + gain) ** -POWER for gain in expected)]
        saved.append(list(accumulate((a - b for a, b in pairwise(waits)), min)))
    heads = [(-each[0], row, 0) for row, each in enumerate(saved) if each and each[0] > 0.0]
    heapq.heapify(heads)
    left, after = float(len(gains)), len(gains) - sum(map(sum, saved))  # `after`: the sum with all guesses
    made, count, wait, seconds = list[int](), 0, plain * left ** (1.0 / POWER), plain
    while heads:
        saves, row, place = heads[0]
        takes, left = price(row, place), left + saves
        made.append(row)
        if takes * max(left, 0.0) ** (1.0 / POWER) < wait:
            count, wait, seconds = len(made), takes * max(left, 0.0) ** (1.0 / POWER), takes
        if takes * max(after, 0.0) ** (1.0 / POWER) >= wait:  # all further guesses together would not help
            break
        if place + 1 < len(saved[row]) and saved[row][place + 1] > 0.0:
            heapq.heapreplace(heads, (-saved[row][place + 1], row, place + 1))
        else:
            heapq.heappop(heads)
    lengths = [0] * len(gains)
    for row in made[:count]:
        lengths[row] += 1
    return ChosenLengths(lengths, wait, seconds)


class StepBatch:
    """Rows of one step, and the cost of the step as a function of its drafts.

    Args:
        rows: all decoding rows of the step, [R].
        free: indices of the rows whose drafts are chosen here.
        beside: prompt tokens in the forward. Their own time does not depend on the drafts and is not counted; see
            `Costs.step`.
        fixed: draft tokens of the other rows.
        nodes: function of methods, path length and `joined` that returns the most nodes of such a draft.
        costs: cost estimates.
        ragged: true if the forward computes the nodes of each draft only; otherwise every row is padded to the widest
            draft.
        acceptance: function of united methods that returns their acceptance estimates.
        runs_model: function that returns true if a method runs a draft model; other methods guess on the host at almost
            no cost.
        longest: L, length of the longest path in tokens.
        now: number of the step.

    Attributes:
        plain: seconds of the step without drafts for the free rows.
        scout: index of the free row for which a draft model reads its backlog although it was not tried yet.
        made: fraction of requested guesses that are drafted, by method and place, [L + 1].
        verified: verified nodes per requested guess, by method and place, [L].
    """

    def __init__(
        self, rows: Sequence[DecodingRow], free: Sequence[int], beside: int, fixed: int,
        nodes: Callable[[tuple[str, ...], int, bool], int], costs: Costs, ragged: bool,
        acceptance: Callable[[tuple[str, ...]], Acceptance], runs_model: Callable[[str], bool], longest: int, now: int,
    ) -> None:  # fmt: skip
        self.rows, self.free, self.longest, self.runs_model = rows, free, longest, runs_model
        self._beside, self._fixed, self.costs, self.ragged, self.nodes = beside, fixed, costs, ragged, nodes
        self._context = sum(row.context for row in rows) / len(rows)
        self._acceptance, self._now, self._steps = acceptance, now, dict[int, float]()
        self.scout = max(free, key=lambda i: rows[i].room - rows[i].backlog)
        self.made, self.verified = dict[str, list[float]](), dict[str, list[float]]()
        for name in sorted({method for i in free for method in rows[i].methods}):
            self.made[name] = made = [1.0, *acceptance((name,)).kept[1:]]
            slots = [nodes((name,), length, False) for length in range(longest + 1)]
            self.verified[name] = [(b - a) * kept for (a, b), kept in zip(pairwise(slots), made[1:], strict=False)]
        self.plain = self.step(0.0)

    def step(self, nodes: float) -> float:
        """Seconds of the target forward with `nodes` draft tokens; drafting and prompts are not counted."""
        below = int(nodes)
        for count in (below, below + 1):
            if count not in self._steps:
                self._steps[count] = self.costs.step(count + self._fixed, len(self.rows), self._context, self._beside)
        return self._steps[below] + (nodes - below) * (self._steps[below + 1] - self._steps[below])

    def choose(self) -> tuple[Sequence[Way], ChosenLengths]:
        """Choose the best drafters and draft lengths of the free rows."""
        found = self.ways()
        choices = [cheapest([way.gains for way in ways], self.plain, _Step(self, ways).add) for ways in found]
        return min(zip(found, choices, strict=True), key=lambda each: each[1].wait)

    def needed(self) -> float:
        """Break-even acceptance probability of one guess per row, of the cheapest drafter."""
        alone = [Way((method,), False, (), (1.0,)) for method in self.rows[self.scout].methods]
        return min(_Step(self, [way], len(self.rows)).add(0, 0) for way in alone) / self.plain - 1.0

    def worth(self, ways: Sequence[Way], choice: ChosenLengths) -> tuple[dict[int, float], dict[str, Time]]:
        """Return the worth of an accepted guess by request, and the worth of draft time by drafter, in one unit.

        The unit is a decrease of the sum over rows of (time per token) ** `POWER`, divided by `POWER` times
        (seconds of the step) ** `POWER`.
        """
        step, on = _Step(self, ways), [i for i, length in enumerate(choice.lengths) if length]
        for i in on:
            for place in range(choice.lengths[i]):
                step.add(i, place)
        weights = {self.rows[i].id: (1.0 + ways[i].gains[choice.lengths[i] - 1]) ** -(1.0 + POWER) for i in on}
        rate = (choice.wait / choice.seconds) ** POWER / choice.seconds
        few, many = self.step(step.nodes / 2.0), self.step(2.0 * step.nodes)
        # The true cost curve is convex. Noise can make the learned curve concave; then its mean slope is used.
        verify = max((many - few) / (1.5 * step.nodes), (many - self.plain) / (2.0 * step.nodes), 0.0)
        times = {}
        for method, active in step.active.items():
            count = max(1.0, active[0])
            level, more = (self.costs.draft(method, n, 2) - self.costs.draft(method, n, 1) for n in (count, 2 * count))
            row = max(0.0, more - level) / count
            times[method] = Time(rate * verify, rate * row, rate * max(0.0, level - row * count))
        return weights, times

    def debt(self, method: str, i: int) -> float:
        """Seconds in which the draft model reads the backlog of row `i`; 0 for host drafters."""
        return self.costs.feed(method, self.rows[i].backlog) if self.runs_model(method) else 0.0

    def ways(self) -> list[Sequence[Way]]:
        """Best combination of drafters of each row; if one runs a draft model, also the best ones without models."""
        best, hosts, free = list[Way](), list[Way](), set(self.free)
        nothing = Way((), False, [0.0] * self.longest, ())
        for i, row in enumerate(self.rows):
            groups = _groups(row.methods, self.runs_model) if i in free else []
            found = [self._way(i, *group) for group in groups] or [nothing]
            waits = [(self._wait(way) if len(found) > 1 else 0.0, n) for n, way in enumerate(found)]
            best.append(found[min(waits)[1]])
            without = [each for each in waits if not any(map(self.runs_model, found[each[1]].methods))]
            hosts.append(found[min(without)[1]] if without else nothing)
        models = any(map(self.runs_model, chain.from_iterable(way.methods for way in best)))
        return [best, hosts] if models and any(way.methods for way in hosts) else [best]

    def _chances(self, i: int, methods: tuple[str, ...]) -> list[float]:
        """Chances of row `i` with the united guesses of `methods`; see `Acceptance`."""
        tried = i == self.scout or sum(self.debt(method, i) for method in methods) <= self.plain
        prior: Sequence[float] = (HOPE, BEST if tried else HOPE)
        if len(methods) > 1:
            prior = united([self._chances(i, (method,)) for method in methods])
        there, *chances = self._acceptance(methods).chances(self.rows[i].id, self._now, prior)[: self.longest + 1]
        return [1.0 if any(map(self.runs_model, methods)) else there, *chances]

    def _way(self, i: int, methods: tuple[str, ...], joined: bool) -> Way:
        """Expected gains of row `i` with these methods, of which at most one, the last, runs a draft model."""
        alone = joined or len(methods) == 1 or not self.runs_model(methods[-1])
        first, shares = methods if alone else methods[:-1], [1.0] * len(methods)
        held = list(accumulate(self._chances(i, first), operator.mul))
        if not alone:
            shares[-1] = 1.0 - held[0]
            model = accumulate(self._chances(i, methods[-1:]), operator.mul)
            held = [a + shares[-1] * b for a, b in zip(held, model, strict=True)]
        row = self.rows[i]
        limit, debt = min(row.limit, self.longest), sum(self.debt(method, i) for method in methods)
        # The cost of reading the backlog is spread over the remaining output tokens, which lowers the gain.
        paid = debt * len(self.rows) / self.plain / max(1, row.room)
        gains = accumulate(chance if place < limit else 0.0 for place, chance in enumerate(held[1:]))
        return Way(methods, joined, [max(0.0, (1.0 + g) / (1.0 + paid * (1.0 + g)) - 1.0) for g in gains], shares)

    def _wait(self, way: Way) -> float:
        """Least seconds per token over all path lengths, if every row of the batch were like this one."""
        step, least = _Step(self, [way], len(self.rows)), self.plain
        for place, gain in enumerate(way.gains):
            least = min(least, step.add(0, place) / (1.0 + gain))
        return least * (1.0 + SAVING * len(way.methods))


class _Step:
    """Running cost of a step while guesses are added.

    Args:
        batch: rows and cost estimates of the step.
        ways: combinations of drafters.
        rows: number of rows that each combination stands for.

    Attributes:
        nodes: expected number of draft tokens.
        active: expected number of rows with a guess at each level, by method.
        drafting: expected seconds of all drafts.
    """

    def __init__(self, batch: StepBatch, ways: Sequence[Way], rows: int = 1) -> None:
        self._batch, self._ways, self._rows = batch, ways, rows
        self.nodes = self.drafting = 0.0
        self.active = dict[str, list[float]]()

    def add(self, row: int, place: int) -> float:
        """Add the guess of a row at a place of its path; return the seconds of the step with all guesses so far."""
        batch, way = self._batch, self._ways[row]
        for method, share in zip(way.methods, way.shares, strict=True):
            # `made` accounts for chains that end early because a guess was not worth its cost.
            self._draft(method, place, share * self._rows * batch.made[method][place])
            self.nodes += share * self._rows * batch.verified[method][place] if batch.ragged else 0.0
        if not batch.ragged:
            self.nodes = max(self.nodes, float(batch.nodes(way.methods, place + 1, way.joined) * len(batch.rows)))
        return batch.step(self.nodes) + self.drafting

    def _draft(self, method: str, place: int, rows: float) -> None:
        """Add the draft cost of `rows` more rows with a guess of `method` at a place of the path."""
        costs, active = self._batch.costs, self.active.setdefault(method, [])
        if len(active) == place:
            active.append(0.0)
        before, after = active[place], active[place] + rows
        more = costs.level(method, after) - costs.level(method, before)
        if place == 0:
            more += costs.first(method, after) - costs.first(method, before)
        active[place], self.drafting = after, self.drafting + more * costs.factor(method, len(self._batch.rows))


def _groups(methods: Sequence[str], runs_model: Callable[[str], bool]) -> list[tuple[tuple[str, ...], bool]]:
    """All combinations of methods with at most one draft model, which is last, each with every valid `joined`."""
    names = sorted(methods, key=runs_model)
    groups = chain.from_iterable(combinations(names, 1 + size) for size in range(len(names)))
    asked = [(group, list(map(runs_model, group))) for group in groups]
    return [(group, joined) for group, runs in asked if sum(runs) < 2 for joined in {False, len(set(runs)) == 2}]
