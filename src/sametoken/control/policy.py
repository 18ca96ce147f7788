"""Controller of an engine: choice of drafters and draft lengths for the next step; plain decoding is one choice.

Its inputs are rows, accepted tokens and measured times; its output is one `RequestedDraft` per row. It reads no clock
and has no reference to the engine.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sametoken.control.acceptance import PRIOR, Acceptance, Gate
from sametoken.control.choice import NO_GAIN, RECALL, DecodingRow, RequestedDraft, StepBatch
from sametoken.control.confidence import Confidence
from sametoken.control.cost import Costs
from sametoken.control.worth import UNPRICED, Time, Worth

BESIDE = 3  # most siblings per guess of the longest chain
KEPT = 8  # steps between two choices
PROBE = 24  # choices between two probes
ANSWER = 256.0  # prior mean length of an answer, in tokens
Drafts = dict[int, RequestedDraft]  # by request


@dataclass
class _Plan:
    """Planned drafts of the next steps.

    Attributes:
        batch: key of the batches with this plan: longest path, true if prompts are computed too, bit length of the
            number of rows.
        drafts: planned draft by request.
        probe: drafts by request that replace the planned ones in the next step, to learn from it; empty for none.
        left: steps until the next choice.
        cost: expected time of a step without its prompts, in plain steps; 0 if unknown.
        weights: weight of a token by request, see `Worth`; empty if unknown.
        times: worth of time by method, see `Worth`; empty if unknown.
    """

    batch: tuple[int, bool, int] = (0, False, 0)
    drafts: Drafts = field(default_factory=dict)
    probe: Drafts = field(default_factory=dict)
    left: int = 0
    cost: float = 0.0
    weights: Mapping[int, float] = field(default_factory=dict)
    times: Mapping[str, Time] = field(default_factory=dict)


class Policy:
    """Controller of one engine.

    Args:
        slots: function of a method and a path length that returns the most nodes of such a draft.
        runs_model: function that returns true if a method runs a draft model; other methods guess on the host at almost
            no cost.
        max_draft_len: length of the longest path of any draft, in tokens.
        schedule: longest path by greatest batch size to which it applies; larger batches do not draft. None applies
            `max_draft_len`, which also bounds the lengths of a schedule, to all batches.
        gate: permanent end of speculation after too few accepted tokens.
        ragged: see `StepBatch`.

    Attributes:
        costs: cost estimates; None until they are measured. Without them every row gets its longest draft.
        longest: `max_draft_len`.
        stoppable: true if the last draft of a method could be ended by `Worth`, by method.
        expected_cost: expected time of the step chosen last without its prompts, in plain steps; 0 if unknown.
        needed: break-even acceptance probability of one guess per row, when drafts were last left out; 0 before.
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
        self._acceptance: dict[tuple[str, ...], Acceptance] = {}  # by united methods, sorted
        self._confidence = defaultdict[str, Confidence](Confidence)
        self.stoppable: dict[str, bool] = {}
        self._plan, self._plans = _Plan(), Counter[int]()  # number of plans by bit length of the number of rows
        self._step = self._probes = 0
        self.needed = self.expected_cost = 0.0
        self._answer = ANSWER

    def saw_answer(self, tokens: int) -> None:
        """Record a finished request with `tokens` output tokens."""
        self._answer += (tokens - self._answer) / PRIOR

    def left(self, room: int) -> float:
        """Expected output tokens of a request that may emit `room` more: those of a mean answer, at most `room`."""
        return min(room, self._answer)

    def bound(self, rows: int) -> int:
        """Longest path in tokens for a batch of `rows` decoding rows."""
        if self._schedule is None:
            return self.longest
        return next((length for size, length in self._schedule if rows <= size), 0)

    def expects(self, method: str) -> bool:
        """Return True if new rows will probably use this method, so that its model should read their prompts."""
        planned = self._plan.drafts.values()
        return not self.gate.closed and (not planned or any(method in each.methods for each in planned))

    def chance(self, method: str) -> float:
        """Acceptance probability of the first guess of a method, over all requests."""
        return self._of((method,)).overall(self._step)[1]

    def _of(self, methods: Sequence[str]) -> Acceptance:
        key = tuple(sorted(methods))
        if key not in self._acceptance:
            self._acceptance[key] = Acceptance(self.longest)
        return self._acceptance[key]

    def nodes(self, methods: Sequence[str], limit: int, joined: bool) -> int:
        """Greatest number of nodes of a draft with these properties; see `RequestedDraft`."""
        each = [(self._runs_model(method), self._slots(method, limit)) for method in methods]
        host = sum(slots for model, slots in each if not model)
        models = [slots for model, slots in each if model]
        return host + sum(models) if joined else max([host, *models])

    def learn(
        self, methods: Sequence[str], requests: Sequence[int], asked: Sequence[int], longest: Sequence[int],
        accepted: Sequence[int],
    ) -> None:  # fmt: skip
        """Learn from the verified drafts of one method, or of several united ones; see `Acceptance.learn`."""
        self._of(methods).learn(self._step, requests, asked, longest, accepted)

    def learn_shares(
        self, method: str, shares: Sequence[Sequence[float]], sampled: bool, drawn: Sequence[int],
        kept: Sequence[int], see: Callable[[float, bool], None],
    ) -> None:  # fmt: skip
        """Learn from a verified chain of `method` with the shares of its guesses; see `Confidence.learn`."""
        self._confidence[method].learn(shares, sampled, drawn, kept, see)

    def saw_draft(self, method: str, rows: int, levels: int, seconds: float) -> None:
        """Record the time of a draft; see `Costs.saw_draft`."""
        if self.costs is not None:
            self.costs.saw_draft(method, rows, levels, seconds)

    def saw_feed(self, method: str, tokens: int, seconds: float) -> None:
        """Record the time in which a draft model read context; see `Costs.saw_feed`."""
        if self.costs is not None:
            self.costs.saw_feed(method, tokens, seconds)

    def saw_step(self, nodes: int, rows: int, context: float, seconds: float) -> None:
        """Record the time of a step; see `Costs.saw_step`."""
        if self.costs is not None:
            self.costs.saw_step(nodes, rows, context, seconds)

    def worth(self, method: str, requests: Sequence[int], sampled: Sequence[bool]) -> Worth | None:
        """Worth of guesses of `method` in the step chosen last, for these requests; None if unknown.

        Requests whose drafts were not chosen by gain, as in a probe, get a weight at which no guess is left out.
        """
        confidence, plan = self._confidence.get(method), self._plan
        if confidence is None or method not in plan.times or not self.expected_cost:
            return None
        weights = [plan.weights.get(each, UNPRICED) for each in requests]
        return Worth(confidence.tables, confidence.typical, sampled, weights, plan.times[method])

    def forget(self, request: int, methods: Sequence[str]) -> None:
        """Drop the counts and the plan of a finished request."""
        for used, acceptance in self._acceptance.items():
            if set(used) <= set(methods):
                acceptance.forget(request)
        self._plan.drafts.pop(request, None)

    def _batch(self, rows: int, beside: int) -> tuple[int, bool, int]:
        """Key of the batches that share a plan; see `_Plan`."""
        return 0 if self.gate.closed else self.bound(rows), beside > 0, rows.bit_length()

    def again(self, ids: Sequence[int], limits: Sequence[int], beside: int) -> list[RequestedDraft] | None:
        """Return the planned drafts of these requests, adapted to this step; None if `choose` must be called.

        Args:
            ids: identifiers of the decoding requests, [R].
            limits: longest useful path of each, in tokens, [R].
            beside: prompt tokens in the same forward.
        """
        plan, batch = self._plan, self._batch(len(ids), beside)
        if not plan.left or plan.batch != batch or not all(request in plan.drafts for request in ids):
            return None
        self.expected_cost = plan.cost
        drafts = [self._open(request, batch[0]) for request in ids]
        if plan.probe:
            drafts = [plan.probe.get(request) or plan.drafts[request] for request in ids]
            plan.probe, self.expected_cost = {}, 0.0
        plan.left, self._step = plan.left - 1, self._step + 1
        return [draft.within(limit) for draft, limit in zip(drafts, limits, strict=True)]

    def choose(self, rows: Sequence[DecodingRow], beside: int = 0) -> list[RequestedDraft]:
        """Choose the draft of each row of the next step.

        Args:
            rows: decoding rows.
            beside: greatest number of prompt tokens in the same forward.
        """
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
        """Planned draft; with the longest path and siblings if the drafter itself ends the chain by `Worth`."""
        draft, priced = self._plan.drafts[request], bool(self._plan.times) and request in self._plan.weights
        stops = priced and all(self.stoppable.get(method, False) for method in draft.methods)
        return draft._replace(limit=bound, siblings=BESIDE * bound) if stops else draft

    def _most(self, row: DecodingRow, bound: int) -> RequestedDraft:
        """Longest draft of a row with all its methods, or the reason for none."""
        limit = min(row.limit, bound)
        if limit:
            return RequestedDraft(limit, row.methods)
        if self.gate.closed:
            return RequestedDraft(0, (), "threshold")
        return RequestedDraft(0, (), "batch" if row.limit else "end")

    def _planned(
        self, key: tuple[int, bool, int], rows: Sequence[DecodingRow], free: Sequence[int], beside: int
    ) -> _Plan:
        """Plan the best drafts of the free rows, given those of the other rows."""
        assert self.costs is not None
        requested = [self._most(row, key[0]) for row in rows]
        for i in free:
            requested[i] = NO_GAIN
        fixed = sum(self.nodes(draft.methods, draft.limit, draft.joined) for draft in requested)
        batch = StepBatch(
            rows, free, beside, fixed, self.nodes, self.costs, self._ragged, self._of, self._runs_model, key[0],
            self._step,
        )  # fmt: skip
        ways, choice = batch.choose()
        for i, length in enumerate(choice.lengths):
            if length:
                requested[i] = RequestedDraft(length, ways[i].methods, joined=ways[i].joined)
        plan = _Plan(key, {row.id: draft for row, draft in zip(rows, requested, strict=True)})
        self._plans[key[2]] += 1
        plan.left = min(KEPT, self._plans[key[2]])  # the first results of a new drafter change the choice most
        plan.probe = self._probe(batch, plan.drafts)
        if not fixed:
            plan.cost = choice.seconds / batch.plain
            if any(choice.lengths):
                plan.weights, plan.times = batch.worth(ways, choice)
        return plan

    def _probe(self, batch: StepBatch, planned: Drafts) -> Drafts:
        """Drafts of a step that is made now and then to measure its cost: no drafts or longer ones, or else one guess.

        Costs of steps that are not made any more would stay as they were measured at first, or at a busy moment.
        """
        on = {row.id: planned[row.id] for row in map(batch.rows.__getitem__, batch.free) if planned[row.id].limit}
        if not on:
            self.needed = batch.needed()
        turn = self._plans[len(batch.rows).bit_length()]
        if turn < KEPT or (turn % PROBE and turn & (turn - 1)):  # soon at first, then rarely
            return {}
        self._probes += 1
        longer = {id: draft._replace(limit=min(2 * draft.limit, batch.longest)) for id, draft in on.items()}
        if on:
            return longer if self._probes % 2 and longer != on else dict.fromkeys(on, RECALL)
        methods = [each for each in batch.rows[batch.scout].methods if batch.debt(each, batch.scout) <= batch.plain]
        guess = [RequestedDraft(1, (method,)) for method in methods]
        return {batch.rows[batch.scout].id: guess[self._probes % len(guess)]} if guess else {}
