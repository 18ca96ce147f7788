"""The drafters of an engine and the policy that chooses among them: asked by the scheduler, told after every step.

Owns the clock of drafts. Knows requests and rows, not how a draft is made nor what the target does with it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sametoken.control.advice import Advice, Pauses
from sametoken.control.allocation import Row
from sametoken.control.policy import Policy, Wish
from sametoken.drafters.base import Drafter
from sametoken.engine.request import Request
from sametoken.engine.runner import merge
from sametoken.engine.scheduler import Decode
from sametoken.speculation.draft import PADDING, Draft
from sametoken.speculation.sampling import Sampling

LOG = logging.getLogger("sametoken")


class Proposal(NamedTuple):
    """The draft of the decoding rows of a step, and who made each row's part; None where nobody had a guess."""

    draft: Draft
    drafters: list[str | None]


class Drafting:
    """Everything about drafts that the engine's step needs.

    Args:
        drafters: by method.
        policy: chooses lengths and methods.

    Attributes:
        taps: the target layers that any of the drafters reads, in order of layer.
        pauses: whether drafts are made, and why not.
    """

    def __init__(self, drafters: dict[str, Drafter], policy: Policy) -> None:
        self.drafters, self.policy = drafters, policy
        self.taps = tuple(sorted({tap for drafter in drafters.values() for tap in drafter.taps}))
        self._advice, self.pauses = Advice(), Pauses()

    def runs_model(self, method: str) -> bool:
        """Whether guessing takes forwards of a model; the others guess on the host for next to nothing."""
        return self.drafters[method].runs_model

    def unbounded(self, rows: int) -> bool:
        """Whether so many rows may draft as much as there is; a captured step knows one length only."""
        return not self.policy.gate.closed and self.policy.bound(rows) == self.policy.longest

    # What the scheduler asks.

    def choose(self, pending: Sequence[Request], beside: int) -> list[Wish]:
        """How the decoding requests of the next step want to be drafted; it also reads `beside` prompt tokens."""
        if not pending:
            return []
        rest = self.policy.rests([request.id for request in pending], beside)
        if rest is not None:
            return [rest] * len(pending)
        return self.policy.choose([self._row(request) for request in pending], beside)

    def _row(self, request: Request) -> Row:
        row, context, room = request.row, len(request.tokens) - 1, request.room
        backlog = 0
        if request.adaptive and row is not None and request.half:
            backlog = context - self._held(row, request)
        limit = request.draft_limit
        return Row(request.id, request.methods, limit, request.adaptive, context, backlog, room)

    def slots(self, methods: Sequence[str], limit: int) -> int:
        """Cache slots past the pending token for a draft by any of these methods."""
        return max((self.drafters[method].slots(limit) for method in methods), default=0) if limit else 0

    def held(self, request: Request) -> int:
        """Leading tokens of a running request for which its pages hold the drafter's half."""
        assert request.row is not None
        return self._held(request.row, request)

    def _held(self, row: int, request: Request) -> int:
        return next((self.drafters[m].held(row) for m in request.methods if self.drafters[m].namespace), 0)

    # What the step does.

    def _of(self, request: Request) -> list[Drafter]:
        return [self.drafters[method] for method in request.methods]

    def admit(self, row: int, request: Request, cached: int, held: int) -> None:
        for drafter in self._of(request):
            drafter.admit(row, request.tokens[:cached], held)
            if request.prediction is not None:
                drafter.expect(row, request.prediction)

    def release(self, row: int, request: Request) -> None:
        for drafter in self._of(request):
            drafter.release(row)

    def end(self, request: Request) -> None:
        """The request will not come back."""
        self.policy.forget(request.id, request.methods)
        forwards = sum(request.stats.drafted_lengths[1:])
        gate = self.policy.gate
        if gate.record(request.stats.accepted, forwards):
            self._say(
                f"drafting ends for good: on average {gate.average:.2f} draft tokens were accepted per forward over "
                f"the last {gate.window} requests, acceptance_length_threshold is {gate.threshold}"
            )
        self._say(*self._advice.saw_end(request.methods, [m for m in self.drafters if self.runs_model(m)]))

    def propose(
        self, decode: Sequence[Decode], decoding: Sequence[Request], sampling: Callable[[list[Request]], Sampling]
    ) -> Proposal:
        """Asks each row's drafters, those on the host first, until one has a guess."""
        found: list[tuple[list[int], Draft]] = []
        makers: list[str | None] = [None] * len(decode)
        for method in sorted(self.drafters, key=self.runs_model):
            places = [i for i, item in enumerate(decode) if item.limit and method in item.methods and makers[i] is None]
            if not places:
                continue
            draft = self._ask(method, places, decode, decoding, sampling)
            empty = (draft.tokens[:, 1:] == PADDING).all(1).tolist()
            made = [n for n, nothing in enumerate(empty) if not nothing]
            for n in made:
                makers[places[n]] = method
            if made:
                kept = draft if len(made) == len(places) else Draft(draft.tokens[made], draft.parents[made])
                found.append(([places[n] for n in made], kept))
        return Proposal(merge([request.tokens[-1] for request in decoding], found), makers)

    def _ask(
        self,
        method: str,
        places: Sequence[int],
        decode: Sequence[Decode],
        decoding: Sequence[Request],
        sampling: Callable[[list[Request]], Sampling],
    ) -> Draft:
        """One drafter's draft for some places of the batch, timed."""
        drafter = self.drafters[method]
        requests = [decoding[i] for i in places]
        rows, limits = [decode[i].row for i in places], [decode[i].limit for i in places]
        drafter.catch_up(rows)
        together = sampling(requests)
        begin = time.perf_counter()
        draft = drafter.propose(rows, [request.tokens[-1] for request in requests], limits, together)
        assert draft.tokens.shape[1] <= 1 + max(map(drafter.slots, limits)), f"{method} drafts more than it said"
        if self.policy.costs is not None:
            self.policy.costs.saw_draft(method, len(rows), max(limits), time.perf_counter() - begin)
        return draft

    def learn(
        self,
        decode: Sequence[Decode],
        decoding: Sequence[Request],
        proposal: Proposal,
        found: Sequence[tuple[int, int]],
    ) -> None:
        """Told the longest path and the accepted tokens of every decoding row."""
        for item, request, maker, (longest, accepted) in zip(decode, decoding, proposal.drafters, found, strict=True):
            if request.methods:
                request.stats.count_draft(maker, item.reason or "silent")
            if not item.limit:
                continue
            for method in item.methods:
                if maker is None or method == maker or not self.runs_model(method):
                    self.policy.learn(
                        request.id, method, item.limit, *((longest, accepted) if method == maker else (0, 0))
                    )
            if maker is not None and self.runs_model(maker):
                self._say(*self._advice.saw_draft(maker, accepted > 0))
        adaptive = [item for item, request in zip(decode, decoding, strict=True) if request.adaptive]
        if adaptive:
            method = next(request.methods[0] for request in decoding if request.adaptive)
            self._tell_pauses("" if any(item.limit for item in adaptive) else adaptive[0].reason, method, len(decode))

    def _tell_pauses(self, reason: str, method: str, rows: int) -> None:
        """Logs that drafting stops or resumes, after a forward that might have drafted.

        Args:
            reason: why it did not, "" if it did.
        """
        if not self.pauses.saw_forward(reason):
            return
        if not self.pauses.reason:
            LOG.info("drafting resumed")
            return
        why = {
            "gain": f"about {self.policy.chance(method):.0%} of {method}'s first guesses come true, and "
            f"with {rows} rows a draft pays from about {self.policy.needed:.0%}",
            "slower": f"with {rows} rows drafts decoded at {self.policy.account(rows).ratio:.2f} of the "
            "speed of plain steps",
        }[self.pauses.reason]
        LOG.warning(
            f"drafting stopped: {why}. It is tried again now and then; a better or cheaper draft, or "
            "smaller batches, would help, and method 'none' saves its memory"
        )

    def observe(
        self, method: str, rows: Sequence[int], tokens: Sequence[Sequence[int]], features: Tensor | None, prompt: bool
    ) -> None:
        """Tells a drafter what became certain; of a prompt it reads at once what it will need soon.

        Args:
            features: [tokens, len(taps) * H] of all `taps`, None without.
        """
        drafter = self.drafters[method]
        drafter.observe(rows, tokens, self._own(drafter, features))
        if prompt and self.policy.expects(method):
            drafter.catch_up(rows)

    def _own(self, drafter: Drafter, features: Tensor | None) -> Tensor | None:
        """The columns that a drafter reads of the features of all, in its order."""
        if features is None or not drafter.taps:
            return None
        if drafter.taps == self.taps:
            return features
        parts = features.chunk(len(self.taps), dim=1)
        return torch.cat([parts[self.taps.index(tap)] for tap in drafter.taps], dim=1)

    def _say(self, *warnings: str) -> None:
        for warning in warnings:
            LOG.warning(warning)
