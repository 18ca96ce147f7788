"""The controller: choice of drafters and draft lengths for the next step, plain decoding included as a choice.

Pure: no clock, no engine. It observes rows, accepted tokens and times, and returns one `RequestedDraft` per row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sametoken.control.acceptance import PRIOR, Acceptance, Gate, Overlap
from sametoken.control.choice import NO_GAIN, DecodingRow, RequestedDraft, StepBatch
from sametoken.control.confidence import Confidence, Reliability
from sametoken.control.cost import Costs
from sametoken.control.trials import Drafts, Trials
from sametoken.control.worth import UNPRICED, Time, Worth

BESIDE = 3  # most siblings per guess of the longest chain
KEPT = 8  # steps for which a choice holds
ANSWER = 256.0  # tokens of an answer before any was seen


@dataclass
class _Plan:
    """Planned drafts of the next steps.

    Attributes:
        batch: the batches that it is for: longest path, whether prompts are beside, digits of their rows.
        drafts: by request.
        trials: drafts of the next steps in place of the planned ones.
        left: steps until the next choice.
        cost: seconds expected of a step without its prompts, in plain steps; 0 if unknown.
        weights, times: see `Worth`: by request, and by method; empty if unknown.
    """

    batch: tuple[int, bool, int] = (0, False, 0)
    drafts: Drafts = field(default_factory=dict)
    trials: list[Drafts] = field(default_factory=list)
    left: int = 0
    cost: float = 0.0
    weights: Mapping[int, float] = field(default_factory=dict)
    times: Mapping[str, Time] = field(default_factory=dict)


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
        self._trials = defaultdict[int, Trials](Trials)  # by digits of the number of rows
        self._plan = _Plan()
        self._step = 0
        self._needed = 0.0
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
        planned = self._plan.drafts.values()
        return not self.gate.closed and (not planned or any(method in each.methods for each in planned))

    def chance(self, method: str) -> float:
        """Chance that the first guess of a method is accepted, over all requests."""
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

    def learn(
        self, method: str, requests: Sequence[int], asked: Sequence[int], longest: Sequence[int],
        accepted: Sequence[int], siblings: Sequence[int] = (0,), saved: Sequence[bool] = (False,),
    ) -> None:  # fmt: skip
        """Learn from verified drafts of `method`, see `Acceptance.learn`."""
        self._of(method).learn(self._step, requests, asked, longest, accepted, siblings, saved)

    def learn_overlap(self, methods: Sequence[str], accepted: Sequence[int]) -> None:
        """Learn from verified guesses of several methods about one place; `accepted` of each were right."""
        self._overlap(methods).learn([count for _, count in sorted(zip(methods, accepted, strict=True))])

    def learn_shares(
        self, method: str, shares: Sequence[Sequence[float]], sampled: bool, drawn: Sequence[int],
        kept: Sequence[int], seen: Reliability,
    ) -> None:  # fmt: skip
        """Learn from a verified chain of `method` with the shares of its guesses; see `Confidence.learn`."""
        self._confidence[method].learn(shares, sampled, drawn, kept, seen)

    def saw_draft(self, method: str, rows: int, levels: int, seconds: float) -> None:
        """Record the time of a draft, see `Costs.saw_draft`."""
        if self.costs is not None:
            self.costs.saw_draft(method, rows, levels, seconds)

    def saw_feed(self, method: str, tokens: int, seconds: float) -> None:
        """Record the time of reading, see `Costs.saw_feed`."""
        if self.costs is not None:
            self.costs.saw_feed(method, tokens, seconds)

    def saw_step(self, nodes: int, rows: int, context: float, seconds: float) -> None:
        """Record the time of a step, see `Costs.saw_step`."""
        if self.costs is not None:
            self.costs.saw_step(nodes, rows, context, seconds)

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
        for method in methods:
            self._of(method).forget(request)
        self._plan.drafts.pop(request, None)

    def _batch(self, rows: int, beside: int) -> tuple[int, bool, int]:
        """Batches that share a plan with this one; the first item is the longest path."""
        return 0 if self.gate.closed else self.bound(rows), beside > 0, rows.bit_length()

    def again(self, ids: Sequence[int], limits: Sequence[int], beside: int) -> list[RequestedDraft] | None:
        """Planned drafts of these requests, adapted to this step; None if `choose` must be called.

        Args:
            limits: longest useful path of each.
        """
        plan, batch = self._plan, self._batch(len(ids), beside)
        if not plan.left or plan.batch != batch or not all(request in plan.drafts for request in ids):
            return None
        self.expected_cost = plan.cost
        drafts = [self._open(request, batch[0]) for request in ids]
        plan.trials = [trial for trial in plan.trials if any(request in trial for request in ids)]
        if plan.trials:
            trial, self.expected_cost = plan.trials.pop(0), 0.0
            drafts = [trial.get(request) or plan.drafts[request] for request in ids]
        plan.left, self._step = plan.left - 1, self._step + 1
        return [draft.within(limit) for draft, limit in zip(drafts, limits, strict=True)]

    def choose(self, rows: Sequence[DecodingRow], beside: int = 0) -> list[RequestedDraft]:
        """Choose the draft of each row of the next step, which also reads up to `beside` prompt tokens."""
        batch = self._batch(len(rows), beside)
        free = [i for i, row in enumerate(rows) if row.adaptive and row.limit and batch[0]]
        if not free or self.costs is None:
            self.expected_cost, self._step = 0.0, self._step + 1
            return [self._most(row, batch[0]) for row in rows]
        limits = [row.limit for row in rows]
        if (requested := self.again([row.id for row in rows], limits, beside)) is None:
            self._plan = self._planned(batch, rows, free, beside)
            requested = self.again([row.id for row in rows], limits, beside)
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

    def _planned(
        self, key: tuple[int, bool, int], rows: Sequence[DecodingRow], free: Sequence[int], beside: int
    ) -> _Plan:
        """The best drafts of the free rows, given those of the other rows, and the trials that are due."""
        assert self.costs is not None
        requested = [self._most(row, key[0]) for row in rows]
        for i in free:
            requested[i] = NO_GAIN
        fixed = sum(self.nodes(draft.methods, draft.limit, draft.joined) for draft in requested)
        asked = {method: self._of(method) for i in free for method in rows[i].methods}
        batch = StepBatch(
            rows, free, beside, fixed, self.nodes, self.costs, self._ragged, asked, self._runs_model, key[0]
        )
        found = batch.ways(self._step, lambda methods: self._overlap(methods).spread)
        choice, ways = min(((batch.choose(ways), ways) for ways in found), key=lambda each: each[0].wait)
        for i, length in enumerate(choice.lengths):
            if length:
                requested[i] = RequestedDraft(length, ways[i].methods, joined=ways[i].joined)
        trials = self._trials[key[2]]
        due = trials.due(batch, ways, choice, requested)
        self._needed = trials.needed or self._needed
        plan = _Plan(key, {row.id: draft for row, draft in zip(rows, requested, strict=True)}, due, KEPT + len(due))
        if not fixed:
            plan.cost = choice.seconds / batch.plain
            if any(choice.lengths):
                plan.weights, plan.times = batch.worth(ways, choice)
        return plan
