"""Drafters of an engine, and the policy that chooses among them for every step.

`Drafting` connects both with requests and rows; drafts are made by drafters, and verified by the runner.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from sametoken.control.choice import DecodingRow, RequestedDraft
from sametoken.control.policy import Policy
from sametoken.drafters.base import Drafter, Proposed, RowOrigin
from sametoken.drafters.padded import NO_GUESS, Guess
from sametoken.engine.advice import Advice, Pauses
from sametoken.engine.chains import Said, said_in
from sametoken.engine.meter import Clock, Meter
from sametoken.engine.plan import Decode, Plan
from sametoken.engine.report import Done, Makers, Proposal, RowResult
from sametoken.engine.request import Request
from sametoken.engine.rows import Rows
from sametoken.speculation.draft import Union, union

LOG = logging.getLogger("sametoken")
READ = 64  # least number of tokens, read by a drafter in one step, whose time measures the cost of reading


class Drafting:
    """Drafts in the engine's step.

    Args:
        drafters: drafters by method.
        policy: policy that chooses lengths and methods.
        rows: requests by row.
        meter: meter whose clock of drafts runs while drafters work.

    Attributes:
        drafters: as given.
        policy: as given.
        taps: target layers that any of the drafters reads, in order.
        pauses: detector of pauses of drafting.
    """

    def __init__(self, drafters: dict[str, Drafter], policy: Policy, rows: Rows, meter: Meter) -> None:
        self.drafters, self.policy, self._seats = drafters, policy, rows
        self._meter, self._clock = meter, meter.drafting
        self.taps = tuple(sorted({tap for drafter in drafters.values() for tap in drafter.taps}))
        self._advice, self.pauses = Advice(), Pauses()
        self._said: dict[tuple[str, int], Said] = {}  # in this step, by method and place of a decoding row

    def runs_model(self, method: str) -> bool:
        """True if a method runs forwards of a model; others look up tokens on the host at almost no cost."""
        return self.drafters[method].runs_model

    def unbounded(self, rows: int) -> bool:
        """True if `rows` rows may have drafts of full length, the only length of a captured step."""
        return not self.policy.gate.closed and self.policy.bound(rows) == self.policy.longest

    # Called by the scheduler.

    def choose(self, pending: Sequence[Request], beside: int) -> list[RequestedDraft]:
        """Requested draft of each decoding request of the next step, which also reads `beside` prompt tokens."""
        if not pending:
            return []
        ids, limits = [request.id for request in pending], [request.draft_limit for request in pending]
        requested = self.policy.again(ids, limits, beside)
        if requested is None:
            with (clock := Clock()):
                requested = self.policy.choose([self._row(request) for request in pending], beside)
            self._meter.aside.seconds += clock.seconds
        return requested

    def _row(self, request: Request) -> DecodingRow:
        row, context = request.row, len(request.tokens) - 1
        room = self.policy.left(request.room)
        backlog = 0
        if request.adaptive and row is not None and request.draft_kv:
            models = (self.drafters[method] for method in request.methods if self.drafters[method].namespace)
            backlog = next((drafter.unread(row, context) for drafter in models), 0)
        limit = request.draft_limit
        return DecodingRow(request.id, request.methods, limit, request.adaptive, context, backlog, room)

    def slots(self, methods: Sequence[str], limit: int, joined: bool = False) -> int:
        """Cache slots past the pending token for a draft by these methods.

        For several methods, the number is limited to the slots that rows have past the end of their context.
        """
        wanted = self.policy.nodes(methods, limit, joined)
        return wanted if len(methods) < 2 else min(wanted, limit + max(each.nodes for each in self.drafters.values()))

    def draft_cached(self, request: Request, *, catch_up: bool = False) -> int:
        """Leading tokens of a request with the drafter's keys and values; see `scheduler.Drafts`."""
        row = _row(request)
        for drafter in self._of(request) if catch_up else ():
            drafter.catch_up([row])
        return self._draft_cached(row, request)

    def _draft_cached(self, row: int, request: Request) -> int:
        return next((self.drafters[m].cached_tokens(row) for m in request.methods if self.drafters[m].namespace), 0)

    # Called by the step.

    def _of(self, request: Request) -> list[Drafter]:
        return [self.drafters[method] for method in request.methods]

    def admit(self, row: int, request: Request, cached: int, draft_cached: int) -> None:
        origin = RowOrigin(request.salt.hex(), request.prediction)
        for drafter in self._of(request):
            drafter.admit(row, request.tokens[:cached], draft_cached, origin)

    def release(self, row: int, request: Request) -> None:
        for drafter in self._of(request):
            drafter.release(row)

    def end(self, request: Request) -> None:
        """Update policy, acceptance gate and advice with a request that has ended."""
        self.policy.forget(request.id, request.methods)
        self.policy.saw_answer(len(request.output_ids))
        forwards = sum(request.stats.drafted_lengths[1:])
        gate = self.policy.gate
        if gate.record(request.stats.accepted, forwards):
            self._warn(
                f"drafting ends for good: on average {gate.average:.2f} draft tokens were accepted per forward over "
                f"the last {gate.window} requests, acceptance_length_threshold is {gate.threshold}"
            )
        self._warn(*self._advice.saw_end(request.methods, [m for m in self.drafters if self.runs_model(m)]))

    def propose(self, plan: Plan) -> Proposal:
        """Draft for each row with its drafters and unite their guesses; a captured step drafts on the device.

        All drafters on the host run first; a model drafts if they have no guess, or if the draft is `joined`.
        """
        self._said.clear()
        if plan.captured:
            return Proposal((), (), [item.methods[:1] if item.limit else () for item in plan.decode])
        with self._clock:
            found: list[list[Guess]] = [[] for _ in plan.decode]
            makers: list[Makers] = [()] * len(found)
            for method in sorted(self.drafters, key=self.runs_model):
                places = [i for i, item in enumerate(plan.decode) if item.limit and method in item.methods]
                if self.runs_model(method):
                    places = [i for i in places if plan.decode[i].joined or not found[i]]
                if not places:
                    continue
                proposed = self._proposed(method, [plan.decode[i] for i in places])
                self._said.update(zip(((method, place) for place in places), said_in(proposed), strict=False))
                for place, guess in zip(places, proposed.drafts, strict=True):
                    if guess.tokens:
                        found[place].append(guess)
                        makers[place] += (method,)
            guesses, unions = [each[0] if each else NO_GUESS for each in found], dict[int, Union]()
            for place, (item, parts) in enumerate(zip(plan.decode, found, strict=True)):
                if len(parts) > 1:
                    most = self.slots(item.methods, item.limit, item.joined) + item.siblings
                    united = unions[place] = union(parts, most)
                    guesses[place] = Guess(united.tokens, united.parents)
            pending = [request.tokens[-1] for request in self._seats.of(plan.decode)]
            return Proposal(pending, guesses, makers, unions)

    def _proposed(self, method: str, items: Sequence[Decode]) -> Proposed:
        """Proposal of one drafter for some rows; the policy is updated with its time."""
        drafter, requests = self.drafters[method], self._seats.of(items)
        rows, limits = [item.row for item in items], [item.limit for item in items]
        unread = sum(drafter.unread(row, len(request.tokens) - 1) for row, request in zip(rows, requests, strict=True))
        with (reading := Clock()):
            drafter.catch_up(rows)
        if drafter.namespace and unread >= READ:
            self.policy.saw_feed(method, unread, reading.seconds)
        together = self._seats.sampling(requests)
        sampled = [request.params.temperature > 0 for request in requests]
        worth = self.policy.worth(method, [request.id for request in requests], sampled)
        # Only a drafter that reports shares gets a worth, so that others need no such parameter.
        priced = () if worth is None else (worth._replace(siblings=[item.siblings for item in items]),)
        pending = [request.tokens[-1] for request in requests]
        with (clock := Clock()):
            proposed = Proposed.of(drafter.propose(rows, pending, limits, together, *priced))
        most = max(drafter.slots(item.limit) + item.siblings for item in items)
        assert all(len(guess.tokens) <= most for guess in proposed.drafts), f"{method} exceeds its `slots`"
        if worth is not None:
            self.policy.stoppable[method] = proposed.ended is not None and self.runs_model(method)
        self._meter.aside.seconds += clock.seconds + reading.seconds
        levels = max(limits if proposed.ended is None else proposed.ended.made)
        self.policy.saw_draft(method, len(rows), levels, clock.seconds)
        return proposed

    def observe(self, done: Done) -> None:
        """Pass accepted and rejected guesses to the policy, and committed tokens to the drafters."""
        count = len(done.plan.decode)
        decoded, read = done.rows[:count], done.rows[count:]
        self._learn(done.plan.decode, decoded, done.proposal)
        if done.plan.captured:  # the runner of captured steps has updated the drafters
            return
        with self._clock:
            for method, drafter in self.drafters.items():
                # Finished requests too: pages that they offer to others may hold the draft's KV.
                rows = [row for row in decoded if method in row.request.methods]
                if rows:
                    self._pass_committed(drafter, rows)
            for row in read:
                for method in row.request.methods:
                    self._pass_committed(self.drafters[method], [row])
                    # A head reads in every step, since unread hidden states take memory. A draft model reads at its
                    # first draft: the first token need not wait, and the policy expects drafts to pay by then.
                    if self.drafters[method].taps and self.policy.expects(method):
                        self.drafters[method].catch_up([_row(row.request)])

    def _pass_committed(self, drafter: Drafter, rows: Sequence[RowResult]) -> None:
        """Pass the committed tokens of some rows to a drafter, with its features."""
        features = None
        if drafter.taps:
            found = [row.features for row in rows if row.features is not None]
            features = self._own(drafter, found[0] if len(found) == 1 else torch.cat(found))
        drafter.observe([_row(row.request) for row in rows], [row.committed for row in rows], features)

    def _learn(self, decode: Sequence[Decode], rows: Sequence[RowResult], proposal: Proposal) -> None:
        """Update the policy with the longest path and the accepted tokens of each drafter of each decoding row."""
        seen: dict[tuple[str, ...], list[tuple[int, ...]]] = {}
        for place, (item, row) in enumerate(zip(decode, rows, strict=True)):
            request, makers = row.request, proposal.makers[place]
            found = dict.fromkeys(makers, (row.longest, row.accepted))
            if place in proposal.unions:
                found = proposal.unions[place].parts(makers, row.path)
            best = max(makers, key=lambda maker: found[maker][1], default=None)
            asked = [m for m in item.methods if item.joined or not makers or m in makers or not self.runs_model(m)]
            left_out = False
            for method in asked:
                if (method, place) in self._said:
                    self._learn_shares(method, place, row, *found.get(method, (0, 0)))
                    # A guess that was left out counts as not accepted.
                    left_out = left_out or (method not in makers and bool(self._said[method, place].shares))
                    found.setdefault(method, (int(self.runs_model(method)), 0))
                found.setdefault(method, (0, 0))
                if self.runs_model(method) and method in makers:
                    self._warn(*self._advice.saw_draft(method, found[method][1] > 0))
            if request.methods:
                request.stats.count_draft(best, item.reason or ("gain" if left_out else "silent"))
            united = tuple(sorted(method for method in asked if item.joined or not self.runs_model(method)))
            for used in {*((method,) for method in asked), united} - {()}:
                longest, accepted = (max(found[method][which] for method in used) for which in (0, 1))
                seen.setdefault(used, []).append((request.id, item.limit, longest, accepted))
        for used, drafts in seen.items():
            self.policy.learn(used, *zip(*drafts, strict=True))
        adaptive = [(item, row.request) for item, row in zip(decode, rows, strict=True) if row.request.adaptive]
        if adaptive:
            left_out = adaptive[0][0].reason == "gain" and not any(item.limit for item, _ in adaptive)
            self._log_pauses(left_out, adaptive[0][1].methods[0], len(decode))

    def _learn_shares(self, method: str, place: int, row: RowResult, longest: int, accepted: int) -> None:
        """Update the policy with a row's shares and their outcome."""
        said, emitted = self._said[method, place], () if row.emission is None else row.emission.token_ids
        drawn, kept = said.outcome(longest, accepted, emitted)
        seen = row.request.stats.seen_of(method)
        self.policy.learn_shares(method, said.shares, row.request.params.temperature > 0, drawn, kept, seen.see)

    def _log_pauses(self, left_out: bool, method: str, rows: int) -> None:
        """Log that drafting stops or resumes, after a forward that could have had a draft."""
        if not self.pauses.saw_forward(left_out):
            return
        if not self.pauses.paused:
            LOG.info("drafting resumed")
            return
        needed = self.policy.needed
        bar = f"with {rows} rows a draft pays from about {needed:.0%}" if needed else "it must read prompts first"
        why = f"about {self.policy.chance(method):.0%} of {method}'s first guesses are accepted, and {bar}"
        LOG.warning(
            f"drafting stopped: {why}. It is tried again from time to time; a better or cheaper draft, or "
            "smaller batches, would help, and method 'none' saves its memory"
        )

    def _own(self, drafter: Drafter, features: Tensor) -> Tensor:
        """Columns of the features for the taps of a drafter, in their order."""
        if drafter.taps == self.taps:
            return features
        parts = features.chunk(len(self.taps), dim=1)
        return torch.cat([parts[self.taps.index(tap)] for tap in drafter.taps], dim=1)

    def _warn(self, *warnings: str) -> None:
        for warning in warnings:
            LOG.warning(warning)


def _row(request: Request) -> int:
    assert request.row is not None
    return request.row
