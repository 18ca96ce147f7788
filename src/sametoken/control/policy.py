"""The controller: who drafts how much in the next step, plain decoding included as a choice that can be left again.

Pure: no clock, no engine. It observes what rows there are, what was accepted and what things took, and answers with
one `RequestedDraft` per row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from sametoken.control.acceptance import Acceptance, Gate, Overlap
from sametoken.control.allocation import allocate
from sametoken.control.batch import NO_GAIN, DecodingRow, RequestedDraft, StepBatch
from sametoken.control.confidence import Confidence, Reliability
from sametoken.control.cost import Costs
from sametoken.control.trials import TrialBasis, Trials, TrialStep
from sametoken.control.worth import UNPRICED, Time, Worth

DEAR = 0.03  # seconds of a plain step from which on chains end by worth: below, a guess costs less than is known
BESIDE = 3  # most siblings per guess of the longest chain
REST = 8  # steps that a choice is kept for while the batch stays the same; twice as many each time it is confirmed,
MOST_REST = 32  # up to so many


@dataclass
class _Plan:
    """The last choice: for which batch, what each row was asked, and what was expected of it.

    Attributes:
        age: steps that it was kept for. `keep`: steps after which it is made anew.
        cost: seconds expected, in plain steps; 0 where not known.
        rests: whether all rows might draft and nobody does.
        trial: what the next step is to ask instead. `warm`: whether caches are warm for it, see `Policy._make`.
        weights, times: see `Worth`: by request, and by method; empty where nobody knows.
    """

    key: object = None
    requested: list[RequestedDraft] = field(default_factory=list)
    age: int = 0
    keep: int = REST
    cost: float = 0.0
    rests: bool = False
    trial: TrialStep | None = None
    warm: bool = False
    weights: dict[int, float] = field(default_factory=dict)
    times: dict[str, Time] = field(default_factory=dict)


class Policy:
    """The controller of one engine.

    Args:
        slots: nodes of a draft of a method whose paths have at most so many tokens.
        runs_model: whether a method runs a model; the others guess on the host for next to nothing.
        max_draft_len: longest path of any draft.
        schedule: batch size -> longest path, for batches up to that size; none above the largest. None is no bound
            but `max_draft_len`, which bounds these lengths too.
        gate: ends speculation for good.
        ragged: see `StepBatch`.
    """

    def __init__(
        self,
        slots: Callable[[str, int], int],
        runs_model: Callable[[str], bool],
        max_draft_len: int,
        schedule: Mapping[int, int] | None = None,
        gate: Gate | None = None,
        ragged: bool = True,
    ) -> None:
        self.costs: Costs | None = None  # until it is measured, whoever may draft does
        self.gate = gate or Gate()
        self.longest, self._slots, self._runs_model, self._ragged = max_draft_len, slots, runs_model, ragged
        self._schedule = None
        if schedule is not None:
            self._schedule = sorted((size, min(length, max_draft_len)) for size, length in schedule.items())
        self._acceptance: dict[str, Acceptance] = {}
        self._overlaps: dict[frozenset[str], Overlap] = {}
        self._confidence = defaultdict[str, Confidence](Confidence)
        self.stoppable: dict[str, bool] = {}  # whether worth could end the last draft of a method
        self._news: list[Callable[[], object]] = []  # what is to be learned before the next choice
        self._plan = _Plan()
        self._choosing = 0.0  # seconds that a choice takes
        self._warms = False  # whether a step drafts after a rest, which takes longer than the next ones will
        self._trials: dict[int, Trials] = {}  # by the binary digits of the number of rows
        self.expected_cost = 0.0  # plain steps that the step chosen last should take; 0 where that is not known

    def bound(self, rows: int) -> int:
        """Longest path in a batch of so many decoding rows."""
        if self._schedule is None:
            return self.longest
        return next((length for size, length in self._schedule if rows <= size), 0)

    def expects(self, method: str) -> bool:
        """Whether new rows will probably draft with this method, so that reading along is not in vain."""
        used = (method in each.methods for each in self._plan.requested)
        return not self.gate.closed and (self._plan.key is None or any(used))

    def chance(self, method: str) -> float:
        """That the first guess of a method comes true, over all requests."""
        self._learn()
        return float(self._of(method).engine[1])

    def _of(self, method: str) -> Acceptance:
        if method not in self._acceptance:
            self._acceptance[method] = Acceptance(self.longest)
        return self._acceptance[method]

    # What was seen is learned together, right before the next choice: code and tables are in the processor's caches
    # then, and not after a forward. A step of a small model is short.

    def learn(
        self, method: str, requests: Sequence[int], asked: Sequence[int], longest: Sequence[int],
        accepted: Sequence[int], siblings: Sequence[int] = (0,), saved: Sequence[bool] = (False,),
    ) -> None:  # fmt: skip
        """Drafts of `method` were verified, see `Acceptance.learn`."""
        self._news.append(partial(self._of(method).learn, requests, asked, longest, accepted, siblings, saved))

    def learn_overlap(self, methods: Sequence[str], accepted: Sequence[int]) -> None:
        """Guesses of several methods about one place were verified, of which so many of each came true."""
        each = sorted(zip(methods, accepted, strict=True))
        self._news.append(partial(self._overlap(methods).learn, [count for _, count in each]))

    def _overlap(self, methods: Sequence[str]) -> Overlap:
        key = frozenset(methods)
        if key not in self._overlaps:
            self._overlaps[key] = Overlap(len(key), self.longest)
        return self._overlaps[key]

    def nodes(self, methods: Sequence[str], limit: int, joined: bool) -> int:
        """Most nodes of a draft, see `RequestedDraft`."""
        each = [(self._runs_model(method), self._slots(method, limit)) for method in methods]
        host = sum(slots for model, slots in each if not model)
        models = [slots for model, slots in each if model]
        return host + sum(models) if joined else max([host, *models])

    def learn_shares(
        self, method: str, shares: Sequence[Sequence[float]], sampled: bool, drawn: Sequence[int],
        kept: Sequence[int], seen: Reliability,
    ) -> None:  # fmt: skip
        """A chain of `method`, which says how clearly each guess won its draw, was verified; see `Confidence.learn`."""
        self._news.append(partial(self._confidence[method].learn, shares, sampled, drawn, kept, seen))

    def saw_draft(self, method: str, rows: int, levels: int, seconds: float) -> None:
        """See `Costs.saw_draft`."""
        if self.costs is not None and not self._warms:
            self._news.append(partial(self.costs.saw_draft, method, rows, levels, seconds))

    def saw_step(self, nodes: int, rows: int, context: float, seconds: float) -> None:
        """See `Costs.saw_step`; of a long rest the first steps tell enough."""
        enough = self._plan.rests and len(self._news) >= REST
        if self.costs is not None and not self._warms and not (enough and not nodes):
            self._news.append(partial(self.costs.saw_step, nodes, rows, context, seconds))

    def _learn(self) -> None:
        news, self._news = self._news, []
        for learn in news:
            learn()

    def worth(self, method: str, requests: Sequence[int], sampled: Sequence[bool]) -> Worth | None:
        """What guesses of `method` for these requests are worth in the step chosen last; None where nobody knows.

        Guesses for requests whose drafts were not chosen by gain, such as trials, are made whatever they are worth.
        """
        confidence, plan = self._confidence.get(method), self._plan
        if confidence is None or method not in plan.times or not self.expected_cost:
            return None
        weights = [plan.weights.get(each, UNPRICED) for each in requests]
        return Worth(confidence.tables, confidence.typical, sampled, weights, plan.times[method])

    def forget(self, request: int, methods: Sequence[str]) -> None:
        """The request ended."""
        self._learn()
        for method in methods:
            self._of(method).forget(request)

    def _trials_of(self, rows: int) -> Trials:
        if rows.bit_length() not in self._trials:
            self._trials[rows.bit_length()] = Trials(self._runs_model)
        return self._trials[rows.bit_length()]

    def needed(self, rows: int) -> float:
        """The chance at which one guess a row would have paid when it was last tried in a batch of about this size."""
        return self._trials_of(rows).needed

    def again(self, ids: Sequence[int], limits: Sequence[int], beside: int) -> list[RequestedDraft] | None:
        """What `choose` would say for these requests, if that is what it said before; None where it has to be asked.

        Args:
            limits: longest path that is of use to each.
        """
        plan, trials, bound = self._plan, self._trials_of(len(ids)), 0 if self.gate.closed else self.bound(len(ids))
        self._warms = False
        if plan.key != (bound, beside > 0, tuple(ids)):
            return None
        if plan.trial:  # not in the step of the choice, which leaves the caches cold: its cost would seem more
            return self._make(plan, trials, limits)
        if trials.near() or (plan.age + 1 >= plan.keep and not plan.rests):
            return None
        plan.age += 1
        trials.step()
        self.expected_cost = plan.cost
        return [_within(self._open(draft, bound), limit) for draft, limit in zip(plan.requested, limits, strict=True)]

    def _make(self, plan: _Plan, trials: Trials, limits: Sequence[int]) -> list[RequestedDraft]:
        """The trial of a plan: where nobody drafts in two steps, of which the first, which is dearer, warms caches."""
        assert plan.trial is not None
        self._warms, plan.warm = plan.rests and not plan.warm, True
        requested, self.expected_cost = plan.trial.requested, 0.0
        if not self._warms:
            trials.made(plan.trial)
            plan.trial = None
        return [_within(draft, limit) for draft, limit in zip(requested, limits, strict=True)]

    def choose(self, rows: Sequence[DecodingRow], beside: int = 0) -> list[RequestedDraft]:
        """One requested draft per row of the next step, which also reads `beside` prompt tokens."""
        self.expected_cost, self._warms = 0.0, False
        bound = 0 if self.gate.closed else self.bound(len(rows))
        free = [i for i, row in enumerate(rows) if row.adaptive and row.limit and bound]
        if not free or self.costs is None:
            return [self._most(row, bound) for row in rows]
        ids, limits = [row.id for row in rows], [row.limit for row in rows]
        again = self.again(ids, limits, beside)
        if again is not None:
            return again
        self._learn()
        trials = self._trials_of(len(rows))
        before, choice = self._plan, self._choose(rows, free, bound, beside)
        plan = self._plan
        if len(free) == len(rows):
            plan.key = (bound, beside > 0, tuple(ids))
            plan.keep = min(2 * before.keep, MOST_REST) if before.key == plan.key and _alike(before, plan) else REST
        trials.step()
        plan.trial = trials.due(choice)
        if plan.trial and (before.trial or plan.key is None):  # the batch has changed since, and may do so again
            plan.warm = True
            return self._make(plan, trials, limits)
        self.expected_cost = plan.cost
        return [_within(self._open(draft, bound), limit) for draft, limit in zip(plan.requested, limits, strict=True)]

    def took(self, seconds: float) -> None:
        """The last choice took so long, see `choose`; a trial takes about one."""
        self._choosing = (self._choosing + seconds) / 2

    def _open(self, draft: RequestedDraft, bound: int) -> RequestedDraft:
        """A planned draft, with the longest path and siblings where what guesses are worth will end it."""
        stops = draft.limit and self._plan.times and all(self.stoppable.get(method, False) for method in draft.methods)
        return draft._replace(limit=bound, siblings=BESIDE * bound) if stops else draft

    def _most(self, row: DecodingRow, bound: int) -> RequestedDraft:
        """As much as the row may draft, in the order of its methods."""
        limit = min(row.limit, bound)
        if limit:
            return RequestedDraft(limit, row.methods)
        if self.gate.closed:
            return RequestedDraft(0, (), "threshold")
        return RequestedDraft(0, (), "batch" if row.limit else "end")

    def _choose(self, rows: Sequence[DecodingRow], free: Sequence[int], bound: int, beside: int) -> TrialBasis:
        """Plans the best drafts of the free rows beside those of the others."""
        assert self.costs is not None
        requested = [self._most(row, bound) for row in rows]
        for i in free:
            requested[i] = NO_GAIN
        fixed = sum(self.nodes(draft.methods, draft.limit, draft.joined) for draft in requested)
        asked = sorted({method for i in free for method in rows[i].methods})
        slots = [max(self._slots(method, length) for method in asked) for length in range(bound + 1)]
        batch = StepBatch(rows, free, beside + fixed, slots, self.costs, self._ragged)
        usable = {method: self._of(method) for method in asked}
        found = batch.ways(usable, self._runs_model, lambda methods: self._overlap(methods).spread)
        drafting = any(draft.limit for draft in self._plan.requested)
        choices = [(allocate(ways.gains, partial(batch.prices, ways), drafting), ways) for ways in found]
        choice, ways = min(choices, key=lambda each: each[0].wait)
        for i in np.flatnonzero(choice.lengths).tolist():
            requested[i] = RequestedDraft(int(choice.lengths[i]), ways.methods[i], joined=ways.joined[i])
        rests = len(free) == len(rows) and not choice.lengths.any()
        plan = _Plan(requested=requested, cost=0.0 if fixed else choice.seconds / batch.plain, rests=rests)
        if choice.lengths.any() and not fixed and batch.plain >= DEAR:
            plan.weights, plan.times = batch.worth(ways, choice)
        self._plan = plan
        return TrialBasis(requested, batch, ways, choice.wait, self._choosing)


def _alike(before: _Plan, after: _Plan) -> bool:
    """Whether two plans for the same rows differ by a quarter of each length at most."""
    pairs = zip(before.requested, after.requested, strict=True)
    return all(
        a.methods == b.methods and a.joined == b.joined and 4 * abs(a.limit - b.limit) <= max(a.limit, b.limit)
        for a, b in pairs
    )


def _within(draft: RequestedDraft, limit: int) -> RequestedDraft:
    """A draft with paths of at most `limit` tokens."""
    return draft._replace(limit=limit, reason="" if limit else "end") if draft.limit > limit else draft
