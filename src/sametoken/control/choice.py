"""Choice of the guesses of a step: the beginning of one list of all, ordered by how much each shortens the wait.

A path's chance never grows along it, so each row's guesses stand in their order, and the best set of any size is a
beginning of the list. The minimised quantity is a mean over rows of the time that a token takes, see `POWER`: most
tokens per second of the batch would slow rows with wrong guesses for those with right ones. Pure arithmetic. Legend: R
rows, L longest path.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain, combinations, pairwise
from typing import NamedTuple

from sametoken.control.acceptance import Acceptance, united
from sametoken.control.cost import Costs
from sametoken.control.worth import Time

POWER = 2.0  # of the mean over rows of the time of a token: 1 is their average, more heeds the slowest rows more
SAVING = 0.02  # of the time of its row's tokens that a further drafter must save to be asked


class DecodingRow(NamedTuple):
    """A row that decodes.

    Attributes:
        id: the request's.
        methods: drafters that it may use.
        limit: longest path that is of use to it.
        adaptive: true if its length is chosen here; otherwise it is `limit`.
        context: tokens before the pending one.
        backlog: tokens that its draft model has yet to read.
        room: tokens that it will still emit, as far as is known.
    """

    id: int
    methods: tuple[str, ...]
    limit: int
    adaptive: bool
    context: int
    backlog: int
    room: float


class RequestedDraft(NamedTuple):
    """A draft of at most `limit` tokens on a path, or the reason for none.

    Those of `methods` that guess on the host all run, and their guesses are united. A model runs if they have no guess,
    or, if the draft is `joined`, always.

    Beside the tokens of a chain as many as `siblings` more may stand.

    Reasons: "end" of the request, "batch" too large for the schedule, "threshold" missed for good, "gain" too small,
    "recall": to measure the cost of a step without drafts.
    """

    limit: int
    methods: tuple[str, ...]
    reason: str = ""
    joined: bool = False
    siblings: int = 0

    def within(self, limit: int) -> RequestedDraft:
        """The draft, cut to paths of `limit` tokens for a row that has no more room."""
        if self.limit <= limit:
            return self
        return self._replace(limit=limit) if limit else RequestedDraft(0, (), "end")


NO_GAIN, RECALL = RequestedDraft(0, (), "gain"), RequestedDraft(0, (), "recall")


class Way(NamedTuple):
    """Drafters of a row and their expected gains.

    Attributes:
        methods, joined: its drafters, see `RequestedDraft`.
        gains: [L] guesses expected to be accepted with paths of 1, 2, .. tokens; beyond the row's longest no more.
        shares: share of the steps in which each method runs.
    """

    methods: tuple[str, ...]
    joined: bool
    gains: Sequence[float]
    shares: Sequence[float]


class ChosenLengths(NamedTuple):
    """Length of each row's draft.

    Attributes:
        lengths: [R] tokens on its paths, 0 for none.
        wait: seconds that a token takes: of rows w, (sum of w ** `POWER`) ** (1 / `POWER`).
        seconds: of the step.
    """

    lengths: Sequence[int]
    wait: float
    seconds: float


def cheapest(gains: Sequence[Sequence[float]], plain: float, price: Callable[[int, int], float]) -> ChosenLengths:
    """Find the beginning of the list with the least wait for a token; nothing is drafted if drafts do not pay.

    Args:
        gains: [R][L] guesses expected to be accepted with paths of 1, 2, .. tokens.
        plain: seconds of the step without any guess.
        price: adds the guess of a row at a place of its path to the step; seconds of the step with all so far.
    """
    saved = []
    for expected in gains:
        waits = [1.0, *((1.0 + gain) ** -POWER for gain in expected)]
        saved.append(list(accumulate((a - b for a, b in pairwise(waits)), min)))
    heads = [(-each[0], row, 0) for row, each in enumerate(saved) if each and each[0] > 0.0]
    heapq.heapify(heads)
    left, after = float(len(gains)), len(gains) - sum(map(sum, saved))  # the latter with all guesses of the list
    made, count, wait, seconds = list[int](), 0, plain * left ** (1.0 / POWER), plain
    while heads:
        saves, row, place = heads[0]
        takes, left = price(row, place), left + saves
        made.append(row)
        if takes * max(left, 0.0) ** (1.0 / POWER) < wait:
            count, wait, seconds = len(made), takes * max(left, 0.0) ** (1.0 / POWER), takes
        if takes * max(after, 0.0) ** (1.0 / POWER) >= wait:  # nor would all the others together make it less
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
    """Rows of one step and its cost.

    Args:
        rows: all of the step.
        free: places of those whose drafts are chosen.
        beside: tokens of prompts that the forward computes too. Their time is the same whatever is drafted, and as many
            prompts come however fast the rows get on, so it is not counted; see `Costs.step`.
        fixed: tokens of drafts that are not chosen here.
        nodes: most nodes of a draft by these methods with paths of so many tokens, joined or not.
        costs: of a step.
        ragged: true if a forward computes each row's own nodes; otherwise all compute as many as the widest draft.
        drafters: by method, those that free rows may ask.
        runs_model: true if a method runs a model; the others guess on the host at almost no cost.
        longest: L.

    Attributes:
        plain: seconds of the step without the drafts that are chosen.
    """

    def __init__(
        self, rows: Sequence[DecodingRow], free: Sequence[int], beside: int, fixed: int,
        nodes: Callable[[tuple[str, ...], int, bool], int], costs: Costs, ragged: bool,
        drafters: Mapping[str, Acceptance], runs_model: Callable[[str], bool], longest: int,
    ) -> None:  # fmt: skip
        self.rows, self.free, self.longest, self.runs_model = rows, free, longest, runs_model
        self._beside, self._fixed, self.costs, self.ragged, self.nodes = beside, fixed, costs, ragged, nodes
        self._context = sum(row.context for row in rows) / len(rows)
        self._drafters, self._steps = drafters, dict[int, float]()
        # By method, of a guess that may be made at each place: how often it is, and nodes that are verified for it.
        self.made, self.verified = dict[str, list[float]](), dict[str, list[float]]()
        for name, each in drafters.items():
            self.made[name] = made = [1.0, *each.kept[1:]]
            slots = [nodes((name,), length, False) for length in range(longest + 1)]
            more = [b - a for a, b in pairwise(slots)]
            self.verified[name] = [(1.0 + each.siblings) * m * k for m, k in zip(more, made[1:], strict=False)]
        self.plain = self.step(0.0)

    def step(self, nodes: float) -> float:
        """Seconds of the step with so many draft tokens, without drafting them and without prompts."""
        apart = 1 << max(0, int(nodes).bit_length() - 4)  # between counts that are computed
        below = int(nodes) // apart * apart
        for count in (below, below + apart):
            if count not in self._steps:
                nodes_of_all = count + self._fixed
                self._steps[count] = self.costs.step(nodes_of_all, len(self.rows), self._context, self._beside)
        return self._steps[below] + (nodes - below) / apart * (self._steps[below + apart] - self._steps[below])

    def choose(self, ways: Sequence[Way]) -> ChosenLengths:
        """The best drafts of rows that draft in these ways."""
        return cheapest([way.gains for way in ways], self.plain, _Step(self, ways).add)

    def outcome(self, ways: Sequence[Way], lengths: Sequence[int]) -> tuple[float, float]:
        """The wait for a token (see `ChosenLengths`) and the step's seconds, with such paths in the free rows."""
        step, seconds, left = _Step(self, ways), self.plain, float(len(self.rows) - len(self.free))
        for i in self.free:
            for place in range(lengths[i]):
                seconds = step.add(i, place)
            left += (1.0 + ([0.0, *ways[i].gains][lengths[i]])) ** -POWER
        return seconds * left ** (1.0 / POWER), seconds

    def worth(self, ways: Sequence[Way], choice: ChosenLengths) -> tuple[dict[int, float], dict[str, Time]]:
        """Worth of an accepted guess by request, and worth of time by drafter, in one unit.

        The unit is a decrease of the sum over rows of (time of a token) ** `POWER`, divided by `POWER` times
        (seconds of the step) ** `POWER`.
        """
        step, on = _Step(self, ways), [i for i, length in enumerate(choice.lengths) if length]
        for i in on:
            for place in range(choice.lengths[i]):
                step.add(i, place)
        weights = {self.rows[i].id: (1.0 + ways[i].gains[choice.lengths[i] - 1]) ** -(1.0 + POWER) for i in on}
        rate = (choice.wait / choice.seconds) ** POWER / choice.seconds
        few, many = self.step(step.nodes / 2.0), self.step(2.0 * step.nodes)
        # Costs rise ever faster with tokens. Where what was learned says otherwise, which noise does, their mean holds.
        verify = max((many - few) / (1.5 * step.nodes), (many - self.plain) / (2.0 * step.nodes), 0.0)
        times = {}
        for method, active in step.active.items():
            count = max(1.0, active[0])
            level, more = (self.costs.draft(method, n, 2) - self.costs.draft(method, n, 1) for n in (count, 2 * count))
            row = max(0.0, more - level) / count
            times[method] = Time(rate * verify, rate * row, rate * max(0.0, level - row * count))
        return weights, times

    def debt(self, method: str, i: int) -> float:
        """Seconds to read the tokens that a row's draft model has not read yet."""
        return self.costs.feed(method, self.rows[i].backlog) if self.runs_model(method) else 0.0

    def ways(self, now: int, spread: Callable[[Sequence[str]], float]) -> list[Sequence[Way]]:
        """Best ways of all rows to draft; if one of them runs a model, also the best ways of all rows without models.

        Args:
            now: number of the step.
            spread: of methods whose guesses are united, see `Overlap`.
        """
        best, hosts, free = list[Way](), list[Way](), set(self.free)
        groups = {methods: _groups(methods, self.runs_model) for methods in {self.rows[i].methods for i in free}}
        spreads = {each: spread(each) for group in groups.values() for each, _ in group if len(each) > 1}
        nothing = Way((), False, [0.0] * self.longest, ())
        for i, row in enumerate(self.rows):
            holds = {method: self._holds(method, row, now) for method in row.methods} if i in free else {}
            found = [self._way(i, *group, holds, spreads) for group in groups[row.methods]] if i in free else [nothing]
            waits = [(self._wait(way) if len(found) > 1 else 0.0, n) for n, way in enumerate(found)]
            best.append(found[min(waits)[1]])
            without = [each for each in waits if not any(map(self.runs_model, found[each[1]].methods))]
            hosts.append(found[min(without)[1]] if without else nothing)
        models = any(map(self.runs_model, chain.from_iterable(way.methods for way in best)))
        return [best, hosts] if models and any(way.methods for way in hosts) else [best]

    def _holds(self, method: str, row: DecodingRow, now: int) -> list[float]:
        """Chances [1 + L] that a row has a draft, and that the draft's first 1, 2, .. tokens are right."""
        acceptance = self._drafters[method]
        there, *chances = acceptance.chances(row.id, now)[: self.longest + 1]
        paths = list(accumulate([1.0 if self.runs_model(method) else there, *chances], operator.mul))
        # A sibling makes up for the first wrong guess.
        return [paths[0], *(b + acceptance.saved * (a - b) for a, b in pairwise(paths))]

    def _way(
        self, i: int, methods: tuple[str, ...], joined: bool, holds: Mapping[str, Sequence[float]],
        spreads: Mapping[tuple[str, ...], float],
    ) -> Way:  # fmt: skip
        """Way of a row with these methods, of which at most one, the last, runs a model."""
        alone = joined or len(methods) == 1 or not self.runs_model(methods[-1])
        first, shares = methods if alone else methods[:-1], [1.0] * len(methods)
        held = holds[first[0]] if len(first) == 1 else united([holds[m] for m in first], spreads[first])
        if not alone:
            shares[-1] = 1.0 - held[0]
            held = [a + shares[-1] * b for a, b in zip(held, holds[methods[-1]], strict=True)]
        row = self.rows[i]
        limit, debt = min(row.limit, self.longest), sum(self.debt(method, i) for method in methods)
        # Tokens that its model has yet to read are paid by all tokens to come, which lowers the gain.
        paid = debt * len(self.rows) / self.plain / max(1, row.room)
        gains = accumulate(chance if place < limit else 0.0 for place, chance in enumerate(held[1:]))
        return Way(methods, joined, [max(0.0, (1.0 + g) / (1.0 + paid * (1.0 + g)) - 1.0) for g in gains], shares)

    def _wait(self, way: Way) -> float:
        """Least wait for a token over the lengths of the paths, if all rows were like this one."""
        step, least = _Step(self, [way], len(self.rows)), self.plain
        for place, gain in enumerate(way.gains):
            least = min(least, step.add(0, place) / (1.0 + gain))
        return least * (1.0 + SAVING * len(way.methods))


class _Step:
    """A step to which guesses are added.

    Args:
        batch: its rows. `ways`: their ways to draft, each for `rows` rows.

    Attributes:
        nodes: expected draft tokens.
        active: by method, rows with a guess at each level.
        drafting: seconds of all drafts.
    """

    def __init__(self, batch: StepBatch, ways: Sequence[Way], rows: int = 1) -> None:
        self._batch, self._ways, self._rows = batch, ways, rows
        self.nodes = self.drafting = 0.0
        self.active = dict[str, list[float]]()

    def add(self, row: int, place: int) -> float:
        """Add a guess of a row; return the seconds of the step with all guesses so far."""
        batch, way = self._batch, self._ways[row]
        for method, share in zip(way.methods, way.shares, strict=True):
            # Guesses after one that was not worth its cost are not made.
            self._draft(method, place, share * self._rows * batch.made[method][place])
            self.nodes += share * self._rows * batch.verified[method][place] if batch.ragged else 0.0
        if not batch.ragged:
            self.nodes = max(self.nodes, float(batch.nodes(way.methods, place + 1, way.joined) * len(batch.rows)))
        return batch.step(self.nodes) + self.drafting

    def _draft(self, method: str, place: int, rows: float) -> None:
        """Add rows with a guess of a method at a place of their paths."""
        costs, active = self._batch.costs, self.active.setdefault(method, [])
        if len(active) == place:
            active.append(0.0)
        before, after = active[place], active[place] + rows
        more = costs.level(method, after) - costs.level(method, before)
        if place == 0:
            more += costs.first(method, after) - costs.first(method, before)
        active[place], self.drafting = after, self.drafting + more * costs.factor(method, len(self._batch.rows))


def _groups(methods: Sequence[str], runs_model: Callable[[str], bool]) -> list[tuple[tuple[str, ...], bool]]:
    """All combinations of methods, of which at most one, the last, runs a model; each with the possible values of
    `joined`.
    """
    names = sorted(methods, key=runs_model)
    groups = chain.from_iterable(combinations(names, 1 + size) for size in range(len(names)))
    asked = [(group, list(map(runs_model, group))) for group in groups]
    return [(group, joined) for group, runs in asked if sum(runs) < 2 for joined in {False, len(set(runs)) == 2}]
