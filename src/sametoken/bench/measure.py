"""Statistics of measurements: percentiles, confidence intervals of ratios, acceptance tables, costs of steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from statistics import fmean, median, stdev
from typing import NamedTuple

from sametoken.bench.variant import (
    AcceptanceTable,
    Choice,
    ContextCost,
    Estimate,
    Expectation,
    Position,
    Spread,
    StepCost,
)
from sametoken.control.confidence import BINS
from sametoken.engine.stats import Reliability, SpeculationStats

# 97.5 % quantiles of Student's t for 1 to 30 degrees of freedom d; for larger d, 1.96 + 2.5 / d is within 0.002.
T_QUANTILES = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788, 2.1604, 2.1448,
    2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860, 2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484,
    2.0452, 2.0423,
)  # fmt: skip
INTERVAL_RULE = (
    "speed-ups are geometric means of plain seconds / speculative seconds, paired by round; their 95 % interval is "
    "Student's t interval of the logarithms over the rounds, so it covers what differs from round to round, not other "
    "prompts"
)


class StepTimes(NamedTuple):
    """One step of the engine.

    Attributes:
        rows: number of rows that emitted tokens.
        context: their mean length in tokens.
        emitted: emitted tokens of all rows.
        draft_s: wall time of drafting.
        verify_s: wall time of verification.
        host_s: remaining wall time.
        decoding: true if tokens were emitted and no prompt was computed.
        draft_len: greatest limit of any row's draft, in tokens.
        expected_cost: time that the controller expected, in plain steps; 0 without an expectation.
    """

    rows: int
    context: float
    emitted: int
    draft_s: float
    verify_s: float
    host_s: float
    decoding: bool
    draft_len: int = 0
    expected_cost: float = 0.0

    @property
    def seconds(self) -> float:
        return self.draft_s + self.verify_s + self.host_s


def t_quantile(freedom: int) -> float:
    """97.5 % quantile of Student's t."""
    return T_QUANTILES[freedom - 1] if freedom <= len(T_QUANTILES) else 1.96 + 2.5 / freedom


def ratio_interval(ratios: Sequence[float]) -> Estimate:
    """Geometric mean of paired ratios with its interval, see `INTERVAL_RULE`."""
    logs = [math.log(ratio) for ratio in ratios]
    middle = fmean(logs)
    if len(logs) < 2:
        return Estimate(math.exp(middle))
    margin = t_quantile(len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
    return Estimate(math.exp(middle), math.exp(middle - margin), math.exp(middle + margin))


def spread(values: Sequence[float]) -> Spread:
    """Mean and percentiles of one or more values, interpolated linearly."""
    ordered = sorted(values)
    return Spread(fmean(ordered), *(_percentile(ordered, share) for share in (0.5, 0.95, 0.99)))


def _percentile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def per_token(emissions: Sequence[tuple[float, int]]) -> list[float]:
    """Seconds per token after the first emission; the time of an emission is divided by its tokens.

    Args:
        emissions: seconds since the start of the request, and number of tokens.
    """
    return [(later - earlier) / count for (earlier, _), (later, count) in pairwise(emissions) for _ in range(count)]


def acceptance(stats: Iterable[SpeculationStats]) -> AcceptanceTable:
    """Acceptance over all requests together."""
    pooled = SpeculationStats.total(stats)
    return AcceptanceTable(
        rate=pooled.acceptance_rate,
        length=pooled.acceptance_length,
        forwards_per_token=pooled.target_forwards / pooled.emitted if pooled.emitted else 0.0,
        forwards=pooled.target_forwards,
        emitted=pooled.emitted,
        drafted=pooled.drafted,
        accepted=pooled.accepted,
        accepted_lengths=pooled.accepted_lengths,
        drafted_lengths=pooled.drafted_lengths,
        positions=positions(pooled.accepted_lengths, pooled.drafted_lengths, pooled.tried),
        drafted_by=pooled.drafted_by,
        plain=pooled.plain,
        reliability=[each for drafter, seen in pooled.reliability.items() for each in reliability(drafter, seen)],
    )


def reliability(drafter: str, seen: Reliability) -> list[Expectation]:
    """Expected and real acceptance by bin of the expected chance, without empty bins."""
    counts = enumerate(zip(seen.tried, seen.expected, seen.accepted, strict=True))
    return [
        Expectation(drafter, place / BINS, (place + 1) / BINS, int(tried), expected / tried, accepted / tried)
        for place, (tried, expected, accepted) in counts
        if tried
    ]


def positions(accepted: Sequence[int], drafted: Sequence[int], tried: Sequence[int]) -> list[Position]:
    """Acceptance by position, from the counts of `SpeculationStats`."""
    table = []
    for place in range(len(drafted) - 1):
        guessed, kept = sum(drafted[place + 1 :]), sum(accepted[place + 1 :])
        reached = tried[place] if place < len(tried) else 0
        table.append(Position(place + 1, guessed, reached, kept, kept / guessed, kept / reached if reached else None))
    return table


def step_costs(steps: Iterable[StepTimes]) -> list[StepCost]:
    """Median cost of decoding steps by number of rows."""
    return [
        StepCost(
            rows=rows,
            steps=len(group),
            draft_s=median(step.draft_s for step in group),
            verify_s=median(step.verify_s for step in group),
            host_s=median(step.host_s for step in group),
        )
        for rows, group in sorted(_decoding(steps, lambda step: step.rows).items())
    ]


def context_costs(steps: Iterable[StepTimes]) -> list[ContextCost]:
    """Median cost of decoding steps by power of two of their mean context, at the most frequent number of rows."""
    by_rows = _decoding(steps, lambda step: step.rows)
    commonest = max(by_rows.values(), key=len, default=[])
    return [
        ContextCost(
            low=2**power,
            high=2 ** (power + 1),
            steps=len(group),
            step_s=median(step.seconds for step in group),
            tokens_per_row=sum(step.emitted for step in group) / sum(step.rows for step in group),
        )
        for power, group in sorted(_decoding(commonest, lambda step: int(step.context).bit_length() - 1).items())
    ]


def choices(steps: Iterable[StepTimes]) -> list[Choice]:
    """Costs and tokens of decoding steps by their greatest draft limit."""
    found = []
    for length, group in sorted(_decoding(steps, lambda step: step.draft_len).items()):
        commonest = max(_decoding(group, lambda step: step.rows).values(), key=len)
        tokens = sum(step.emitted for step in group) / sum(step.rows for step in group)
        expected = [step.expected_cost for step in commonest if step.expected_cost]
        took = median(step.seconds for step in commonest)
        found.append(Choice(length, len(group), took, tokens, fmean(expected) if expected else None))
    return found


def _decoding(steps: Iterable[StepTimes], key: Callable[[StepTimes], int]) -> dict[int, list[StepTimes]]:
    """Decoding steps, grouped by `key`."""
    groups: dict[int, list[StepTimes]] = {}
    for step in steps:
        if step.decoding:
            groups.setdefault(key(step), []).append(step)
    return groups
