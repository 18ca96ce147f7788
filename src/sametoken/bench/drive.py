"""Closed load of an engine, `batch` requests at a time, with arrival times of tokens and times of steps.

The clock is read around each step; the engine reports the parts of a step for drafting and verification.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sametoken.bench.measure import StepTimes
from sametoken.check.race import forget_outputs
from sametoken.drafters.rows import GrowingDrafter
from sametoken.engine.llm import LLM
from sametoken.engine.report import StepReport
from sametoken.engine.stats import SpeculationStats
from sametoken.options.sampling import SamplingParams


class TimedRequest(NamedTuple):
    """Prompt and parameters of a request, with the category of the prompt."""

    category: str
    prompt: Sequence[int]
    params: SamplingParams


@dataclass
class TimedOutput:
    """Output of a request with its times.

    Attributes:
        token_ids: output tokens.
        stats: statistics of speculation.
        emissions: seconds since the arrival of the request, and number of tokens, of each emission.
        seconds: seconds from the arrival to the last token.
    """

    token_ids: list[int]
    stats: SpeculationStats
    emissions: list[tuple[float, int]]

    @property
    def ttft(self) -> float:
        return self.emissions[0][0]

    @property
    def seconds(self) -> float:
        return self.emissions[-1][0]


class Pass(NamedTuple):
    """One run of all requests: outputs in order of the requests, steps of the engine, and wall time in seconds."""

    samples: list[TimedOutput]
    steps: list[StepTimes]
    seconds: float


def drive(llm: LLM, jobs: Sequence[TimedRequest], batch: int) -> Pass:
    """Run requests in order, at most `batch` at once, on drafters without memory of earlier calls."""
    forget_outputs(llm)
    waiting = deque(range(len(jobs)))
    going: dict[int, tuple[int, list[tuple[float, int]]]] = {}  # index of the job and emissions, by request id
    samples: dict[int, TimedOutput] = {}
    steps: list[StepTimes] = []
    begin = time.perf_counter()
    while waiting or going:
        while waiting and len(going) < batch:
            place = waiting.popleft()
            (request,) = llm.make_requests(jobs[place].prompt, jobs[place].params)
            llm.engine.add(request)
            going[request.id] = place, []
        before = time.perf_counter()
        report = llm.engine.step()
        now = time.perf_counter()
        steps.append(_step(report, now - before, llm.engine.drafting.policy.expected_cost))
        for emission in report.emissions:
            request = emission.request
            place, came = going[request.id]
            if emission.token_ids:
                came.append((now - request.arrived, len(emission.token_ids)))
            if emission.finished:
                del going[request.id]
                samples[place] = TimedOutput(request.output_ids, request.stats, came)
    return Pass([samples[place] for place in range(len(jobs))], steps, time.perf_counter() - begin)


def branch(llm: LLM, tree_top_k: int) -> None:
    """Set the number of branches of each draft level, at most that of the engine's settings."""
    stated = llm.speculative
    budget = stated.max_total_draft_tokens or stated.max_draft_len * tree_top_k
    for drafter in llm.engine.drafters.values():
        if isinstance(drafter, GrowingDrafter) and drafter.branches != tree_top_k:
            drafter.branch(tree_top_k, budget)


def _step(report: StepReport, seconds: float, expected_cost: float) -> StepTimes:
    """Times of a step of `seconds` wall time."""
    grown = [emission for emission in report.emissions if emission.token_ids]
    context = sum(len(each.request.tokens) for each in grown) / len(grown) if grown else 0.0
    emitted = sum(len(each.token_ids) for each in grown)
    draft_s, verify_s, _ = report.timings
    host_s = max(0.0, seconds - draft_s - verify_s)
    decoding = bool(grown) and not report.plan.prefill
    longest = max((item.limit for item in report.plan.decode), default=0)
    return StepTimes(len(grown), context, emitted, draft_s, verify_s, host_s, decoding, longest, expected_cost)
