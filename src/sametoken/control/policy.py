"""The controller: who drafts how much in the next step, plain decoding included as a choice that can be left again.

Pure: no clock, no engine. It observes what rows there are, what was accepted and what things took, and answers with
one `RequestedDraft` per row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from sametoken.control.acceptance import Acceptance, Gate
from sametoken.control.account import SHARE, Account
from sametoken.control.allocation import DecodingRow, StepBatch, allocate, seconds_per_token
from sametoken.control.confidence import Confidence, Reliability
from sametoken.control.cost import Costs

PROBE_FIRST, PROBE_MOST = 8, 4096  # plain forwards between probes: at least, and at most
EXPLORE = 16  # drafted forwards after which drafters that are not in use are asked too
REST = 8  # forwards that a choice is kept for, whatever happened
STAY = 1.04  # how many times better than a choice already made another must promise to be
REVIEW = 32  # forwards after which a choice is made anew whatever happened
HORIZON = 64  # tokens over which reading a backlog must pay for itself


class RequestedDraft(NamedTuple):
    """A draft of at most `limit` tokens on a path by the first of `methods` that has one; why not, if there is none.

    Reasons: "end" of the request, "batch" too large for the schedule, "threshold" missed for good, "gain" too small as
    predicted, "slower" than plain steps as measured, "recall" of what a step without drafts costs.
    """

    limit: int
    methods: tuple[str, ...]
    reason: str = ""


NO_GAIN, SLOWER, RECALL = (
    RequestedDraft(0, (), "gain"),
    RequestedDraft(0, (), "slower"),
    RequestedDraft(0, (), "recall"),
)


class ExpectedGain(NamedTuple):
    """What drafting one row is expected to bring.

    Attributes:
        gains: guesses that come true on a path of 1, 2, .. tokens.
        methods: the drafters to be asked, in order.
        models: how often a model runs for it; less than 1 when a guess on the host may come first.
    """

    gains: Sequence[float] = ()
    methods: tuple[str, ...] = ()
    models: float = 0.0


@dataclass
class _Choice:
    """The last review: who drafts how, for which batch, and how old it is."""

    key: object = None
    length: int = 0
    methods: dict[int, tuple[str, ...]] = field(default_factory=dict)
    age: int = 0


class Policy:
    """The controller of one engine.

    Args:
        slots: nodes of a draft of a method whose paths have at most so many tokens.
        runs_model: whether a method runs a model; the others guess on the host for next to nothing.
        max_draft_len: longest path of any draft.
        schedule: batch size -> longest path, for batches up to that size; none above the largest. None is no bound
            but `max_draft_len`, which bounds these lengths too.
        gate: ends speculation for good.
        ragged: whether a forward computes each row's own nodes, see `StepBatch`.
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
        self.needed = 0.0  # chance at which one guess a row would have paid when it was last probed
        self.longest, self._slots, self._runs_model, self._ragged = max_draft_len, slots, runs_model, ragged
        self._schedule = None
        if schedule is not None:
            self._schedule = sorted((size, min(length, max_draft_len)) for size, length in schedule.items())
        self._engine: dict[str, Acceptance] = {}
        self._requests: dict[tuple[int, str], Acceptance] = {}
        self._confidence: dict[str, Confidence] = {}
        self._choice = _Choice()
        self._learned = False
        self._since, self._interval, self._probes, self._drafted = 0, PROBE_FIRST, 0, 0
        self._accounts: dict[int, Account] = {}  # by the binary digits of the number of rows
        self._expected = 0.0  # plain steps that the next one should take; 0 where nothing can be learned from it

    def bound(self, rows: int) -> int:
        """Longest path in a batch of so many decoding rows."""
        if self._schedule is None:
            return self.longest
        return next((length for size, length in self._schedule if rows <= size), 0)

    def expects(self, method: str) -> bool:
        """Whether new rows will probably draft with this method, so that reading along is not in vain."""
        return not self.gate.closed and (
            self._choice.key is None or any(method in methods for methods in self._choice.methods.values())
        )

    @property
    def expected_cost(self) -> float:
        """How many plain steps the step that was chosen last should take; 0 where that is not known."""
        return self._expected

    def chance(self, method: str) -> float:
        """That the first guess of a method comes true, over all requests."""
        return self._acceptance(None, method).chance(0)

    def _acceptance(self, request: int | None, method: str) -> Acceptance:
        if method not in self._engine:
            self._engine[method] = Acceptance()
        wider = self._engine[method]
        if request is None:
            return wider
        if (request, method) not in self._requests:
            self._requests[request, method] = Acceptance(wider)
        return self._requests[request, method]

    def learn(self, request: int, method: str, asked: int, longest: int, accepted: int) -> None:
        """A draft of `method` for which `asked` tokens were allowed had `longest` on a path, `accepted` came true."""
        host = not self._runs_model(method)
        for acceptance in (self._acceptance(None, method), self._acceptance(request, method)):
            if host:
                acceptance.asked(longest > 0)
            if longest:
                acceptance.learn(accepted, asked)
        self._learned = True

    def learn_shares(
        self, method: str, shares: Sequence[float], sampled: bool, accepted: int, seen: Reliability
    ) -> None:
        """A chain of `method`, which says how clearly each guess won its draw, was verified; see `Confidence.learn`."""
        self._confidence.setdefault(method, Confidence()).learn(shares, sampled, accepted, seen)

    def forget(self, request: int, methods: Sequence[str]) -> None:
        """The request ended."""
        for method in methods:
            self._requests.pop((request, method), None)

    def rests(self, ids: Sequence[int], beside: int) -> RequestedDraft | None:
        """The draft of all these requests if they go on without drafts and nothing is new: counts the step if so.

        A step of a small model is short; looking at every row again would be felt.
        """
        kept, bound = self._choice, 0 if self.gate.closed else self.bound(len(ids))
        if beside or kept.key != (bound, 0, False, len(ids), tuple(ids)):
            return None
        paused = self.account(len(ids)).paused
        due = self._learned or kept.age + 1 >= REVIEW or self._since + 1 >= self._interval
        if not paused and (due or kept.methods):
            return None
        kept.age += 1
        self._since += not paused
        return SLOWER if paused else NO_GAIN

    def account(self, rows: int) -> Account:
        """What drafts gained or lost in batches of about so many rows."""
        return self._accounts.setdefault(rows.bit_length(), Account(rows))

    def saw_step(self, rows: int, context: float, tokens: float, seconds: float, drafted: bool) -> None:
        """The step that was chosen last read no prompts, took `seconds` and emitted `tokens` per row."""
        if self.costs is None or not self._expected:
            return
        cost = seconds / self.costs.step(rows, rows, context)
        if drafted:
            self.account(rows).saw_draft(tokens, cost, self._expected)
        else:
            self.account(rows).saw_plain(cost)

    def choose(self, rows: Sequence[DecodingRow], beside: int = 0) -> list[RequestedDraft]:
        """One requested draft per row of the next step, which also reads `beside` prompt tokens."""
        self._expected = 0.0
        bound = 0 if self.gate.closed else self.bound(len(rows))
        free = [i for i, row in enumerate(rows) if row.adaptive and row.limit and bound]
        if not free or self.costs is None:
            return [self._most(row, bound) for row in rows]
        requested = [NO_GAIN] * len(rows)
        fixed = self._others(rows, free, bound, requested) if len(free) < len(rows) else 0
        batch = StepBatch(rows, beside, fixed, self._slots, self.costs, self._ragged)
        self._review(batch, free, bound)
        account, off = self.account(len(rows)), free
        if not fixed and (account.paused or account.pending):
            plain = SLOWER if account.paused else RECALL
            requested, off = [plain if draft is NO_GAIN else draft for draft in requested], []
        elif self._choice.methods:
            self._drafted += 1
            self._follow(rows, free, bound, requested)
            off = [i for i in free if requested[i] is NO_GAIN]
        for i, method in self._probe(batch, off):
            requested[i] = RequestedDraft(1, (method,))
        self._expected = 0.0 if fixed else self._plain_steps(batch, requested)
        return requested

    def _plain_steps(self, batch: StepBatch, requested: Sequence[RequestedDraft]) -> float:
        """How many plain steps the step with these drafts should take."""
        methods = Counter(draft.methods[-1] for draft in requested if draft.limit)
        count = sum(methods.values())
        shares = {method: number / count for method, number in methods.items()}
        return batch.price(shares, max(draft.limit for draft in requested), count) / batch.price({}, 0, 0)

    def _others(
        self, rows: Sequence[DecodingRow], free: Sequence[int], bound: int, requested: list[RequestedDraft]
    ) -> int:
        """Rows whose length is not chosen here; returns their draft tokens at most."""
        for i in set(range(len(rows))) - set(free):
            requested[i] = self._most(rows[i], bound)
        return sum(
            max((self._slots(method, draft.limit) for method in draft.methods), default=0) for draft in requested
        )

    def _follow(
        self, rows: Sequence[DecodingRow], free: Sequence[int], bound: int, requested: list[RequestedDraft]
    ) -> None:
        """Rows that the last choice lets draft do so; now and then they ask drafters that are not in use as well."""
        chosen, length = self._choice.methods, min(self._choice.length, bound)
        explore = self._drafted % EXPLORE == EXPLORE - 1
        for i in free:
            row = rows[i]
            methods = chosen.get(row.id)
            if methods and explore and len(row.methods) > 1:
                methods = self._all(row.methods, methods)
            if methods:
                requested[i] = RequestedDraft(min(length, row.limit), methods)

    def _all(self, methods: Sequence[str], used: Sequence[str]) -> tuple[str, ...]:
        """All methods, those on the host first and among them those that are not in use."""
        return tuple(sorted(methods, key=lambda method: (self._runs_model(method), method in used)))

    def _most(self, row: DecodingRow, bound: int) -> RequestedDraft:
        """As much as the row may draft, in the order of its methods."""
        limit = min(row.limit, bound)
        if limit:
            return RequestedDraft(limit, row.methods)
        if self.gate.closed:
            return RequestedDraft(0, (), "threshold")
        return RequestedDraft(0, (), "batch" if row.limit else "end")

    def _review(self, batch: StepBatch, free: Sequence[int], bound: int) -> None:
        """Makes the choice anew where something may have changed it; with many rows, not at every news."""
        kept = self._choice
        kept.age += 1
        key = (bound, batch.fixed, batch.beside > 0, len(batch.rows), tuple(batch.rows[i].id for i in free))
        news = self._learned and kept.age >= max(REST, len(batch.rows))
        if kept.key == key and kept.age < REVIEW and not news:
            return
        model = {self._runs_model(method) for i in free for method in batch.rows[i].methods}
        found = [self._best(batch, free, bound, with_model) for with_model in model]
        self._choice = min(found, key=lambda each: each[0])[1]
        self._choice.key, self._learned = key, False

    def _best(self, batch: StepBatch, free: Sequence[int], bound: int, model: bool) -> tuple[float, _Choice]:
        """The best choice with or without a model, and what a token takes with it, summed over rows."""
        rows = batch.rows
        token = batch.price({}, 0, 0) / len(rows)
        expected = {i: self._expected_gain(rows[i], bound, model, batch.costs, token) for i in free}
        models = [gain.models for gain in expected.values() if gain.methods]
        share = sum(models) / max(1, len(models))
        methods = {m: share if self._runs_model(m) else 1.0 for gain in expected.values() for m in gain.methods}
        gains = [expected[i].gains if i in expected else () for i in range(len(rows))]

        def price(length: int, count: int) -> float:
            return batch.price(methods, length, count)

        def seconds(length: int, chosen: Collection[int]) -> float:
            come_true = [gains[i][min(length, len(gains[i])) - 1] if length and i in chosen else 0.0 for i in places]
            return seconds_per_token(come_true, price(length, len(chosen)))

        places = range(len(rows))
        length, chosen = allocate(gains, price)
        least, kept = seconds(length, chosen), self._choice
        drafting = [i for i in free if rows[i].id in kept.methods and expected[i].methods == kept.methods[rows[i].id]]
        # Estimates waver, and a row that is off for a while has a backlog to read: not for a gain within the noise.
        same = bool(length and kept.length and len(drafting) == len(kept.methods))
        if same and STAY * least > seconds(min(kept.length, bound), drafting):
            length, chosen = min(kept.length, bound), frozenset(drafting)
        return least, _Choice(length=length, methods={rows[i].id: expected[i].methods for i in chosen})

    def _expected_gain(self, row: DecodingRow, bound: int, model: bool, costs: Costs, token: float) -> ExpectedGain:
        """The best way for one row to draft; `token` is the seconds that a token takes without."""
        longest = min(row.limit, bound)
        hosts = [method for method in row.methods if not self._runs_model(method)]
        host = max(hosts, key=lambda m: self._gains(row, m, longest)[-1], default=None)
        mind = next((m for m in row.methods if model and self._runs_model(m)), None)
        if mind is None:
            return ExpectedGain() if host is None else ExpectedGain(self._gains(row, host, longest), (host,))
        debt = costs.feed(mind, row.backlog) / token / max(1, min(HORIZON, row.room))
        thought = [max(0.0, gain - debt) for gain in self._gains(row, mind, longest)]
        if host is None:
            return ExpectedGain(thought, (mind,), 1.0)
        acceptance = self._acceptance(row.id, host)
        copied, offer = acceptance.gains(longest), acceptance.offer
        if copied[-1] < thought[-1]:
            return ExpectedGain(thought, (mind,), 1.0)
        mixed = [offer * a + (1.0 - offer) * b for a, b in zip(copied, thought, strict=True)]
        return ExpectedGain(mixed, (host, mind), 1.0 - offer)

    def _gains(self, row: DecodingRow, method: str, longest: int) -> list[float]:
        """Guesses expected to come true, whether or not the method has any."""
        acceptance = self._acceptance(row.id, method)
        offer = 1.0 if self._runs_model(method) else acceptance.offer
        return [offer * gain for gain in acceptance.gains(longest)]

    def _probe(self, batch: StepBatch, off: Sequence[int]) -> list[tuple[int, str]]:
        """Rows that try one guess although it is not expected to pay, now and then, and with which drafter.

        Probes take `SHARE` of the time. Rows with little to read go first.
        """
        self._since += bool(off)
        if not off or self._since < self._interval:
            return []
        rows = batch.rows
        order = sorted(off, key=lambda i: rows[i].backlog)
        asked = [(i, rows[i].methods[self._probes % len(rows[i].methods)]) for i in order]
        plain = batch.price({}, 0, 0)
        extra = batch.price({method: 1.0 for _, method in asked}, 1, len(asked)) - plain
        self.needed = extra / plain * len(rows) / len(asked)
        debts = list(accumulate(batch.costs.feed(method, rows[i].backlog) for i, method in asked))
        count = max(1, sum(debt <= extra for debt in debts))
        self._interval = max(PROBE_FIRST, min(PROBE_MOST, int((extra + debts[count - 1]) / (SHARE * plain))))
        if self._since < self._interval:
            return []
        self._since, self._interval, self._probes = 0, PROBE_FIRST, self._probes + 1
        return asked[:count]
