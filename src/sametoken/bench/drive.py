"""Drives an engine with a closed load, `batch` requests at a time, and notes when which tokens came and why it took.

The clock is read around whole steps; how a step divides into drafting and verification is the engine's own account.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sametoken.bench.measure import Step
from sametoken.engine.llm import LLM
from sametoken.engine.request import Request, SpeculationStats
from sametoken.heads.factory import MODEL_FREE, build_model_free
from sametoken.options.sampling import SamplingParams


class Job(NamedTuple):
    """A request to be made."""

    category: str
    prompt: Sequence[int]
    params: SamplingParams


@dataclass
class Sample:
    """What came of a job.

    Attributes:
        emissions: seconds since its arrival and how many tokens came then.
        seconds: from its arrival to its last token.
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


class Take(NamedTuple):
    """All jobs, once: samples in order of the jobs, the steps they took, and the wall time of all."""

    samples: list[Sample]
    steps: list[Step]
    seconds: float


@dataclass
class _Going:
    """A request in the engine, and what was known of it after the last step."""

    request: Request
    tokens: int
    draft_s: float = 0.0
    verify_s: float = 0.0
    other_s: float = 0.0
    emissions: list[tuple[float, int]] = field(default_factory=list)


def drive(llm: LLM, jobs: Sequence[Job], batch: int) -> Take:
    """Runs jobs in order, at most `batch` at once, on drafters that remember nothing of earlier calls."""
    forget(llm)
    waiting = deque(range(len(jobs)))
    going: dict[int, _Going] = {}
    samples: dict[int, Sample] = {}
    steps: list[Step] = []
    begin = time.perf_counter()
    while waiting or going:
        while waiting and len(going) < batch:
            place = waiting.popleft()
            (request,) = llm.make_requests(jobs[place].prompt, jobs[place].params)
            llm.engine.add(request)
            going[place] = _Going(request, len(request.tokens))
        before = time.perf_counter()
        llm.engine.step()
        now = time.perf_counter()
        steps.append(_note(going.values(), now, now - before))
        for place in [place for place, one in going.items() if one.request.finish_reason is not None]:
            ended = going.pop(place)
            samples[place] = Sample(ended.request.output_ids, ended.request.stats, ended.emissions)
    return Take([samples[place] for place in range(len(jobs))], steps, time.perf_counter() - begin)


def forget(llm: LLM) -> None:
    """Fresh drafters of those that remember earlier outputs, which a repeated prompt would only read aloud."""
    for method in MODEL_FREE:
        llm.engine.drafters[method] = build_model_free(method, llm.speculative)


def _note(going: Iterable[_Going], now: float, seconds: float) -> Step:
    """What a step was, from what it changed in the requests; brings them up to date."""
    grown = []
    draft_s = verify_s = 0.0
    decoding = True
    for one in going:
        stats, request = one.request.stats, one.request
        took_part = stats.draft_s + stats.verify_s + stats.other_s > one.draft_s + one.verify_s + one.other_s
        # All rows of a step are charged its whole time, so any of them shows it.
        draft_s, verify_s = max(draft_s, stats.draft_s - one.draft_s), max(verify_s, stats.verify_s - one.verify_s)
        one.draft_s, one.verify_s, one.other_s = stats.draft_s, stats.verify_s, stats.other_s
        count = len(request.tokens) - one.tokens
        if took_part and (count == 0 or not one.emissions):
            decoding = False  # it read a part of its prompt
        if count:
            grown.append((len(request.tokens), count))
            one.tokens = len(request.tokens)
            one.emissions.append((now - request.arrived, count))
    context = sum(length for length, _ in grown) / len(grown) if grown else 0.0
    emitted = sum(count for _, count in grown)
    host_s = max(0.0, seconds - draft_s - verify_s)
    return Step(len(grown), context, emitted, draft_s, verify_s, host_s, decoding and bool(grown))
