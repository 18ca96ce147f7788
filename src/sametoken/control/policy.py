"""The controller: choice of drafters and draft lengths for the next step, plain decoding included as a choice.

Pure: no clock, no engine. It observes rows, accepted tokens and times, and returns one `RequestedDraft` per row.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, median, mode

from sametoken.control.acceptance import MEMORY, PRIOR, Acceptance, Gate, Overlap
from sametoken.control.choice import NO_GAIN, ChosenLengths, DecodingRow, RequestedDraft, StepBatch, Way
from sametoken.control.confidence import Confidence, Reliability
from sametoken.control.cost import Costs
from sametoken.control.trials import SHARE, Drafts, ReadingAccount, Trials, TrialStep
from sametoken.control.worth import UNPRICED, Time, Worth

BESIDE = 3  # most siblings per guess of the longest chain
ANSWER = 256.0  # tokens of an answer before any was seen


@dataclass
class _Plan:
    """Planned drafts for batches of about one size.

    Attributes:
        kinds: schedule of trials. `trials`: drafts of the next steps in place of the planned ones.
        drafts: by request. `usual`: those of a row with these methods.
        steps: of such batches so far; `age`: since the choice. `until`: the step of the next choice.
        choosing: seconds that a choice takes.
        cost: seconds expected of a step without its prompts, in plain steps; 0 where not known.
        rests: true if all rows may draft and none does.
        warm: true if caches are warm for trials, or steps so long that it does not matter; see `Policy.again`.
        weights, times: see `Worth`: by request, and by method; empty if unknown.
    """

    kinds: Trials
    drafts: Drafts = field(default_factory=dict)
    usual: dict[tuple[str, ...], RequestedDraft] = field(default_factory=dict)
    steps: int = 0
    age: int = 0
    until: int = 0
    choosing: float = 0.0
    cost: float = 0.0
    rests: bool = False
    trials: list[TrialStep] = field(default_factory=list)
    warm: bool = False
    weights: dict[int, float] = field(default_factory=dict)
    times: dict[str, Time] = field(default_factory=dict)


class Policy:
    """The controller of one engine.

    Args:
        slots: nodes of a draft of a method whose paths have at most so many tokens.
        runs_model: true if a method runs a model; the others guess on the host at almost no cost.
        max_draft_len: longest path of any draft.
        schedule: batch size -> longest path, for batches up to that size; none above the largest. None is no bound
            but `max_draft_len`, which bounds these lengths too.
        gate: ends speculation for good.
        ragged: see `StepBatch`.

    Attributes:
        costs: None until they are measured; all rows that may draft do so until then.
        stoppable: by method, true if worth could end its last draft.
        expected_cost: plain steps that the step chosen last should take, prompts aside; 0 if unknown.
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
        self.costs: Costs | None = None
        self.gate = gate or Gate()
        self.longest, self._slots, self._runs_model, self._ragged = max_draft_len, slots, runs_model, ragged
        self._schedule = None
        if schedule is not None:
            self._schedule = sorted((size, min(length, max_draft_len)) for size, length in schedule.items())
        self._acceptance: dict[str, Acceptance] = {}
        self._overlaps: dict[frozenset[str], Overlap] = {}
        self._confidence = defaultdict[str, Confidence](Confidence)
        self.stoppable: dict[str, bool] = {}
        self._plans: dict[tuple[int, bool, int], _Plan] = {}  # by longest path, prompts beside, digits of their rows
        self._reading = ReadingAccount()
        self._plan = _Plan(Trials(self._reading))  # the one of the last step
        # Observations to learn before the next choice: functions to call, and times of steps.
        self._news: list[Callable[[], object]] = []
        self._took: dict[tuple[int, int], list[tuple[float, float]]] = {}
        self._step = 0
        self._chose = False  # true if the last call of `choose` made a choice
        self._needed = 0.0
        self._warms = False  # true if a step drafts after a rest, which takes longer than the next ones will
        self.expected_cost = 0.0
        self._answer = ANSWER

    def saw_answer(self, tokens: int) -> None:
        """Record a request that ended after `tokens` tokens of output."""
        self._answer += (tokens - self._answer) / PRIOR

    def left(self, room: int) -> float:
        """Expected tokens left for a request that may emit `room` more: those of an average answer, at most `room`."""
        return min(room, self._answer)

    def bound(self, rows: int) -> int:
        """Longest path in a batch of `rows` decoding rows."""
        if self._schedule is None:
            return self.longest
        return next((length for size, length in self._schedule if rows <= size), 0)

    def expects(self, method: str) -> bool:
        """True if new rows will probably draft with this method, so that reading prompts with it pays."""
        usual = self._plan.usual.values()
        return not self.gate.closed and (not usual or any(method in each.methods for each in usual))

    def chance(self, method: str) -> float:
        """Chance that the first guess of a method is accepted, over all requests."""
        self._learn()
        return float(self._of(method).engine[1])

    def needed(self) -> float:
        """Chance at which one guess per row would have paid when it was last tried."""
        return self._needed

    def _of(self, method: str) -> Acceptance:
        if method not in self._acceptance:
            self._acceptance[method] = Acceptance(self.longest)
        return self._acceptance[method]

    def _overlap(self, methods: Sequence[str]) -> Overlap:
        key = frozenset(methods)
        if key not in self._overlaps:
            self._overlaps[key] = Overlap(len(key), self.longest)
        return self._overlaps[key]

    def nodes(self, methods: Sequence[str], limit: int, joined: bool) -> int:
        """Number of nodes of a draft, at most; see `RequestedDraft`."""
        each = [(self._runs_model(method), self._slots(method, limit)) for method in methods]
        host = sum(slots for model, slots in each if not model)
        models = [slots for model, slots in each if model]
        return host + sum(models) if joined else max([host, *models])

    # Observations are learned together, right before the next choice: code and tables are in the processor's caches
    # then, and not after a forward. A step of a small model is short.

    def learn(
        self, method: str, requests: Sequence[int], asked: Sequence[int], longest: Sequence[int],
        accepted: Sequence[int], siblings: Sequence[int] = (0,), saved: Sequence[bool] = (False,),
    ) -> None:  # fmt: skip
        """Learn from verified drafts of `method`, see `Acceptance.learn`."""
        seen = requests, asked, longest, accepted, siblings, saved
        self._news.append(partial(self._of(method).learn, self._step, *seen))

    def learn_overlap(self, methods: Sequence[str], accepted: Sequence[int]) -> None:
        """Learn from verified guesses of several methods about one place; `accepted` of each were right."""
        each = sorted(zip(methods, accepted, strict=True))
        self._news.append(partial(self._overlap(methods).learn, [count for _, count in each]))

    def learn_shares(
        self, method: str, shares: Sequence[Sequence[float]], sampled: bool, drawn: Sequence[int],
        kept: Sequence[int], seen: Reliability,
    ) -> None:  # fmt: skip
        """Learn from a verified chain of `method` with the shares of its guesses; see `Confidence.learn`."""
        self._news.append(partial(self._confidence[method].learn, shares, sampled, drawn, kept, seen))

    def saw_draft(self, method: str, rows: int, levels: int, seconds: float) -> None:
        """Record the time of a draft, see `Costs.saw_draft`."""
        if self.costs is not None and not self._warms:
            self._news.append(partial(self.costs.saw_draft, method, rows, levels, seconds))

    def saw_feed(self, method: str, tokens: int, seconds: float) -> None:
        """Record the time of reading, see `Costs.saw_feed`."""
        if self.costs is not None:
            self._news.append(partial(self.costs.saw_feed, method, tokens, seconds))

    def saw_step(self, nodes: int, rows: int, context: float, seconds: float) -> None:
        """Record the time of a step, see `Costs.saw_step`."""
        if self.costs is not None and not self._warms:
            self._took.setdefault((nodes, rows), []).append((seconds, context))

    def _learn(self) -> None:
        news, took, self._news, self._took = self._news, self._took, [], {}
        for learn in news:
            learn()
        for (nodes, rows), each in took.items():
            seconds, contexts = zip(*each, strict=True)
            assert self.costs is not None
            self.costs.saw_step(nodes, rows, fmean(contexts), median(seconds), len(each))

    def worth(self, method: str, requests: Sequence[int], sampled: Sequence[bool]) -> Worth | None:
        """Worth of guesses of `method` for these requests in the step chosen last; None if unknown.

        Guesses for requests whose drafts were not chosen by gain, such as trials, are made at any worth.
        """
        confidence, plan = self._confidence.get(method), self._plan
        if confidence is None or method not in plan.times or not self.expected_cost:
            return None
        weights = [plan.weights.get(each, UNPRICED) for each in requests]
        return Worth(confidence.tables, confidence.typical, sampled, weights, plan.times[method])

    def forget(self, request: int, methods: Sequence[str]) -> None:
        """Drop the counts of a request that ended."""
        self._learn()
        for method in methods:
            self._of(method).forget(request)
        for plan in self._plans.values():
            plan.drafts.pop(request, None)

    def took(self, seconds: float) -> None:
        """Record the seconds of the last call of `choose`."""
        if self._chose:  # a stolen time slice counts as twice as much at most
            before = self._plan.choosing
            self._plan.choosing = (before + min(seconds, 2.0 * before or seconds)) / 2.0
        self._chose = False

    def _planned(self, rows: int, beside: int) -> tuple[_Plan, int]:
        """Plan for such a batch, and the longest path in it."""
        bound = 0 if self.gate.closed else self.bound(rows)
        return self._plans.setdefault((bound, beside > 0, rows.bit_length()), _Plan(Trials(self._reading))), bound

    def again(self, ids: Sequence[int], limits: Sequence[int], beside: int) -> list[RequestedDraft] | None:
        """Planned drafts of these requests, adapted to this step; None if `choose` must be called.

        Args:
            limits: longest useful path of each.
        """
        plan, bound = self._planned(len(ids), beside)
        if plan.steps >= plan.until or not all(request in plan.drafts for request in ids):
            return None
        self._plan, self._warms, self.expected_cost = plan, False, plan.cost
        drafts = [self._open(request, bound) for request in ids]
        plan.trials = [trial for trial in plan.trials if any(request in trial.drafts for request in ids)]
        if plan.trials and plan.age:  # not in the step of the choice, which leaves the caches cold
            trial, self.expected_cost = plan.trials[0], 0.0
            drafts = [trial.drafts.get(request) or plan.drafts[request] for request in ids]
            self._warms, plan.warm = plan.rests and not plan.warm, True
            if not self._warms:
                plan.kinds.made(plan.trials.pop(0), plan.steps)
        plan.steps, plan.age, self._step = plan.steps + 1, plan.age + 1, self._step + 1
        return [draft.within(limit) for draft, limit in zip(drafts, limits, strict=True)]

    def choose(self, rows: Sequence[DecodingRow], beside: int = 0) -> list[RequestedDraft]:
        """Choose the draft of each row of the next step, which also reads up to `beside` prompt tokens."""
        plan, bound = self._planned(len(rows), beside)
        free = [i for i, row in enumerate(rows) if row.adaptive and row.limit and bound]
        if not free or self.costs is None:
            self.expected_cost, self._warms, self._step = 0.0, False, self._step + 1
            return [self._most(row, bound) for row in rows]
        new = [row for row in rows if row.id not in plan.drafts]
        # A row that joined them drafts like the others until the next choice.
        joined = {row.id: plan.usual.get(row.methods) if row.adaptive else self._most(row, bound) for row in new}
        if plan.steps >= plan.until or 2 * len(new) > len(rows) or None in joined.values():
            self._choose(plan, rows, free, bound, beside)
        else:
            plan.drafts |= {request: draft for request, draft in joined.items() if draft is not None}
            if not all(row.adaptive for row in new):
                plan.cost, plan.times = 0.0, {}
        requested = self.again([row.id for row in rows], [row.limit for row in rows], beside)
        assert requested is not None
        return requested

    def _open(self, request: int, bound: int) -> RequestedDraft:
        """Planned draft, with the longest path and siblings if its chain ends by the worth of its guesses."""
        draft, priced = self._plan.drafts[request], bool(self._plan.times) and request in self._plan.weights
        stops = priced and all(self.stoppable.get(method, False) for method in draft.methods)
        return draft._replace(limit=bound, siblings=BESIDE * bound) if stops else draft

    def _most(self, row: DecodingRow, bound: int) -> RequestedDraft:
        """Longest draft that the row may have, with all its methods in order."""
        limit = min(row.limit, bound)
        if limit:
            return RequestedDraft(limit, row.methods)
        if self.gate.closed:
            return RequestedDraft(0, (), "threshold")
        return RequestedDraft(0, (), "batch" if row.limit else "end")

    def _choose(self, plan: _Plan, rows: Sequence[DecodingRow], free: Sequence[int], bound: int, beside: int) -> None:
        """Plan the best drafts of the free rows, given those of the other rows, and the trials."""
        assert self.costs is not None
        self._learn()
        requested = [self._most(row, bound) for row in rows]
        for i in free:
            requested[i] = NO_GAIN
        fixed = sum(self.nodes(draft.methods, draft.limit, draft.joined) for draft in requested)
        asked = {method: self._of(method) for i in free for method in rows[i].methods}
        batch = StepBatch(
            rows, free, beside, fixed, self.nodes, self.costs, self._ragged, asked, self._runs_model, bound
        )
        found = batch.ways(self._step, lambda methods: self._overlap(methods).spread)
        choice, ways = min(((batch.choose(ways), ways) for ways in found), key=lambda each: each[0].wait)
        for i, length in enumerate(choice.lengths):
            if length:
                requested[i] = RequestedDraft(length, ways[i].methods, joined=ways[i].joined)
        self._keep(plan, batch, ways, choice, requested)
        plan.cost = 0.0 if fixed else choice.seconds / batch.plain
        priced = batch.dear and any(choice.lengths) and not fixed  # elsewhere chains end where the list says
        plan.weights, plan.times = batch.worth(ways, choice) if priced else ({}, {})

    def _keep(
        self, plan: _Plan, batch: StepBatch, ways: Sequence[Way], choice: ChosenLengths,
        requested: Sequence[RequestedDraft],
    ) -> None:  # fmt: skip
        """Keep a choice until another one is worth its time: at first for few steps, since little is measured."""
        plan.drafts = {row.id: draft for row, draft in zip(batch.rows, requested, strict=True)}
        groups: dict[tuple[str, ...], list[RequestedDraft]] = defaultdict(list)
        for i in sorted(batch.free, key=lambda i: -batch.rows[i].limit):  # those that are about to end come last
            groups[batch.rows[i].methods].append(requested[i])
        plan.usual = {methods: mode(drafts) for methods, drafts in groups.items()}
        plan.rests = len(batch.free) == len(batch.rows) and not any(choice.lengths)
        plan.age, plan.warm = 0, batch.dear
        plan.trials = plan.kinds.due(plan.steps, self._step, batch, ways, choice, requested)
        self._needed, self._chose = plan.kinds.needed or self._needed, True
        affordable = min(MEMORY, math.ceil(plan.choosing / (SHARE * choice.seconds)))
        plan.until = plan.steps + 1 + int(min(affordable, plan.steps)) + len(plan.trials) + plan.rests
