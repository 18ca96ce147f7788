"""Clocks and counters of the engine: seconds of drafts and target, preemptions, and times for the controller.

Other parts of a step run in the clock of their kind of work: `with meter.drafting: ...`.
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
        running: number of requests with a row.
        waiting: number of requests without a row.
        pages_used: number of used pages of the cache's pool, without idle pages of shared prefixes.
        pages: number of pages of the pool.
        preemptions: number of times that a request lost its row because pages ran out.
        draft_len: longest path that the last decoding step allowed a draft; 0 for none.
        paused: "gain" while almost nothing is drafted because drafts are not expected to pay, else "".
        draft_s: seconds of all steps so far on drafts.
        verify_s: seconds of all steps so far on the target.
        other_s: other seconds of all steps so far.
        remembered: approximate bytes of the outputs of ended requests in which drafters look up tokens.
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
        pace: limit of prompt tokens that is updated with the times of steps.
        policy: policy of drafts that is updated with the times of steps.

    Attributes:
        drafting: clock of drafts in the current step.
        verifying: clock of the target in the current step.
        aside: clock of work that is not part of a step's cost: choosing drafts, reading, drafting, and the ends of
            requests, whose number does not depend on drafts, but which fall into steps with fewer drafts.
        preemptions: see `EngineLoad`.
        draft_len: see `EngineLoad`.
        totals: seconds of all steps.
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
        """End the step: add its time to its requests, and to the estimates of the controller."""
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
            self._update_costs(done, seconds)
        features = sum(len(row.committed) for row in done.rows if row.features is not None)
        return StepReport(done.plan, emissions, done.proposal.makers, features, timings)

    def _update_costs(self, done: Done, seconds: float) -> None:
        """Update the policy and the pace of prompts with the time of a decoding step."""
        plan, rows = done.plan, len(done.plan.decode)
        context, plain = sum(item.start for item in plan.decode) / rows, None
        if self._policy.costs is not None:
            progress = sum(row.accepted + 1 for row in done.rows[:rows]) / rows
            plain = progress * self._policy.costs.step(0, rows, context)
        self._pace.saw(sum(len(piece.tokens) for piece in plan.prefill), seconds, max(done.tokens, rows), plain)
        if done.tokens and not plan.prefill:
            self._policy.saw_step(done.tokens - rows, rows, context, seconds - self.aside.seconds)
