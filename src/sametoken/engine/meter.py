"""The engine's clocks and counters: seconds of drafts and target, preemptions, and the times that the controller uses.

The only reader of the clock in a step. Other parts of the step name their work: `with meter.drafting: ...`.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from sametoken.control.policy import Policy
from sametoken.engine.pace import Pace
from sametoken.engine.report import Done, StepReport, Timings
from sametoken.engine.request import Emission


class EngineLoad(NamedTuple):
    """Load of an engine, for monitoring.

    Attributes:
        running, waiting: requests with and without a row.
        pages_used, pages: of the cache's pool; pages kept for their prefix alone are not used.
        preemptions: number of times that a request lost its row because pages ran out.
        draft_len: longest path that the last decoding step allowed a draft, 0 for none.
        paused: "gain" while almost nothing is drafted because drafts are not expected to pay, else "".
        draft_s, verify_s, other_s: seconds of all steps so far on drafts, on the target and on the rest.
        remembered: approximate bytes of the outputs of ended requests that drafters look tokens up in.
    """

    running: int
    waiting: int
    pages_used: int
    pages: int
    preemptions: int
    draft_len: int
    paused: str
    draft_s: float
    verify_s: float
    other_s: float
    remembered: int = 0


class Clock:
    """Seconds spent inside its `with` blocks; `seconds` may be set back to 0."""

    __slots__ = ("_begin", "seconds")

    def __init__(self) -> None:
        self.seconds = self._begin = 0.0

    def __enter__(self) -> None:
        self._begin = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._begin


class Meter:
    """Measure steps and report their times to the controller.

    Args:
        pace: divides the time between prompts and streams.
        policy: chooses drafts.

    Attributes:
        drafting, verifying: clocks of the step that runs.
        aside: clock of work that does not count as a step's cost: choosing drafts, reading, drafting, and the ends of
            requests, whose number does not depend on drafts, but which fall into steps that draft less.
        preemptions, draft_len: see `EngineLoad`. `totals`: seconds of all steps.
    """

    def __init__(self, pace: Pace, policy: Policy) -> None:
        self._pace, self._policy = pace, policy
        self.drafting, self.verifying, self.aside = Clock(), Clock(), Clock()
        self.preemptions = self.draft_len = 0
        self.totals = Timings(0.0, 0.0, 0.0)
        self._begin = 0.0

    def begin(self) -> None:
        """Start the clocks of a step."""
        self.drafting.seconds = self.verifying.seconds = self.aside.seconds = 0.0
        self._begin = time.perf_counter()

    def report(self, done: Done, emissions: list[Emission]) -> StepReport:
        """End the step: charge its time to the requests that took part, and to the controller's estimates."""
        seconds = time.perf_counter() - self._begin
        draft_s, verify_s = self.drafting.seconds, self.verifying.seconds
        timings = Timings(draft_s, verify_s, seconds - draft_s - verify_s)
        self.preemptions += len(done.plan.preempted)
        self.draft_len = max((item.limit for item in done.plan.decode), default=self.draft_len)
        if done.requests:
            self.totals = Timings(*map(sum, zip(self.totals, timings, strict=True)))
        for request in done.requests:
            request.stats.charge(*timings)
        if done.plan.decode and not done.plan.captured:
            self._teach(done, seconds)
        features = sum(len(row.committed) for row in done.rows if row.features is not None)
        return StepReport(done.plan, emissions, done.proposal.makers, features, timings)

    def _teach(self, done: Done, seconds: float) -> None:
        """Report the time of a decoding step to the controller and to the pace of prompts."""
        plan, rows = done.plan, len(done.plan.decode)
        context, plain = sum(item.start for item in plan.decode) / rows, None
        if self._policy.costs is not None:
            progress = sum(row.accepted + 1 for row in done.rows[:rows]) / rows
            plain = progress * self._policy.costs.step(0, rows, context)
        self._pace.saw(sum(len(piece.tokens) for piece in plan.prefill), seconds, max(done.tokens, rows), plain)
        if done.tokens and not plan.prefill:
            self._policy.saw_step(done.tokens - rows, rows, context, seconds - self.aside.seconds)
