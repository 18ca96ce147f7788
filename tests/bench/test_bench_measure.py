"""The statistics of measurements; scipy, numpy and counting by hand are the oracles."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as oracle

from sametoken.bench.measure import (
    StepTimes,
    acceptance,
    context_costs,
    per_token,
    ratio_interval,
    spread,
    step_costs,
    t_quantile,
)
from sametoken.engine.stats import SpeculationStats

POSITIVE = st.floats(1e-3, 1e3)


@pytest.mark.parametrize("freedom", [*range(1, 41), 60, 120, 999])
def test_quantiles_of_t(freedom: int) -> None:
    assert t_quantile(freedom) == pytest.approx(oracle.t.ppf(0.975, freedom), abs=2.1e-3)


@given(st.lists(POSITIVE, min_size=2, max_size=12))
def test_the_interval_is_that_of_the_logarithms(ratios: list[float]) -> None:
    found, logs = ratio_interval(ratios), np.log(ratios)
    assert found.value == pytest.approx(oracle.gmean(ratios))
    error = oracle.sem(logs)
    expected = oracle.t.interval(0.95, len(logs) - 1, logs.mean(), error) if error > 0 else (logs.mean(),) * 2
    assert math.log(found.low or 0) == pytest.approx(expected[0], rel=1e-3, abs=1e-3)
    assert math.log(found.high or 0) == pytest.approx(expected[1], rel=1e-3, abs=1e-3)


def test_one_round_has_no_interval() -> None:
    found = ratio_interval([2.0])
    assert (found.low, found.high) == (None, None)
    assert found.value == pytest.approx(2.0)


@given(st.lists(POSITIVE, min_size=1, max_size=50))
def test_percentiles(values: list[float]) -> None:
    found = spread(values)
    assert (found.p50, found.p95, found.p99) == pytest.approx(tuple(np.percentile(values, (50, 95, 99))))
    assert found.mean == pytest.approx(np.mean(values))


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 9)), min_size=1, max_size=30))
def test_gaps_are_shared_by_the_tokens_that_they_brought(steps: list[tuple[float, int]]) -> None:
    times = np.cumsum([gap for gap, _ in steps])
    counts = [count for _, count in steps]
    gaps = per_token(list(zip(times.tolist(), counts, strict=True)))
    assert len(gaps) == sum(counts[1:])
    assert sum(gaps) == pytest.approx(times[-1] - times[0])


FORWARD = st.integers(0, 6).flatmap(lambda drafted: st.tuples(st.just(drafted), st.integers(0, drafted)))


@given(st.lists(st.lists(FORWARD, max_size=20), max_size=5))
def test_acceptance_is_what_counting_by_hand_gives(requests: list[list[tuple[int, int]]]) -> None:
    made = []
    for forwards in requests:
        one = SpeculationStats("x")
        for drafted, accepted in forwards:
            one.count(accepted + 1, drafted, accepted, drafted)
        made.append(one)
    found = acceptance(made)
    every = [forward for forwards in requests for forward in forwards]
    assert found.forwards == len(every)
    assert found.drafted == sum(drafted for drafted, _ in every)
    assert found.rate == (found.accepted / found.drafted if found.drafted else 0)
    if every:
        assert found.length == pytest.approx(1 + sum(accepted for _, accepted in every) / len(every))
        assert found.forwards_per_token == pytest.approx(1 / found.length)
    for at, position in enumerate(found.positions):
        guessed = [accepted > at for drafted, accepted in every if drafted > at]
        reached = [accepted > at for drafted, accepted in every if drafted > at and accepted >= at]
        assert (position.position, position.drafted, position.tried) == (at + 1, len(guessed), len(reached))
        assert position.unconditional == pytest.approx(np.mean(guessed))
        assert position.conditional == (pytest.approx(np.mean(reached)) if reached else None)
    assert len(found.positions) == max((drafted for drafted, _ in every), default=0)
    assert sum(found.accepted_lengths) == sum(found.drafted_lengths) == len(every)


def test_expected_acceptance_stands_beside_the_real_one() -> None:
    made = [SpeculationStats("x") for _ in range(2)]
    for stats, chance, right in ((made[0], 0.62, True), (made[1], 0.68, True), (made[1], 0.66, False)):
        stats.seen_of("draft_target").see(chance, right)
    made[0].seen_of("eagle").see(1.0, True)
    found = {each.drafter: each for each in acceptance(made).reliability}
    draft, head = found["draft_target"], found["eagle"]
    assert (draft.low, draft.high, draft.tried) == (0.6, 0.7, 3)
    assert (draft.expected, draft.accepted) == pytest.approx((0.653333, 2 / 3), abs=1e-6)
    assert (head.low, head.high, head.tried, head.expected, head.accepted) == (0.9, 1.0, 1, 1.0, 1.0)


def step(rows: int, context: float, verify_s: float, decoding: bool = True) -> StepTimes:
    return StepTimes(rows, context, 2 * rows, 0.001, verify_s, 0.0, decoding)


def test_costs_leave_out_prompts_and_are_medians() -> None:
    steps = [step(1, 10, 1), step(1, 20, 3), step(1, 40, 100), step(2, 10, 7), step(1, 10, 1000, decoding=False)]
    assert [(one.rows, one.steps, one.verify_s) for one in step_costs(steps)] == [(1, 3, 3), (2, 1, 7)]
    found = [(one.low, one.high, one.steps, one.tokens_per_row) for one in context_costs(steps)]
    assert found == [(8, 16, 1, 2.0), (16, 32, 1, 2.0), (32, 64, 1, 2.0)]
    assert context_costs([]) == step_costs([]) == []
