"""The simulation of benchmarks/scale.py gives what can be computed by hand."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from itertools import accumulate
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def scale() -> ModuleType:
    """benchmarks/scale.py as a module."""
    spec = spec_from_file_location("scale", Path(__file__).parents[2] / "benchmarks" / "scale.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules["scale"] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_steps_lie_on_lines_between_what_was_measured(scale: ModuleType) -> None:
    costs = scale.Costs({1: 1.0, 3: 2.0}, 0.25, 0.0, (1,))
    assert [costs.step(rows, 0) for rows in (1, 2, 3, 5)] == [1.0, 1.5, 2.0, 3.0]
    assert costs.step(2, 2) == 2.0


def test_one_client_waits_for_its_steps(scale: ModuleType) -> None:
    costs = scale.Costs({1: 1.0, 2: 1.5}, 0.5, 0.25, (4,))  # four steps
    seen = scale.simulate(costs, scale.Load(8, 20, clients=1), 2, 4)
    assert seen.median == seen.p95 == pytest.approx(0.5 + 4 * 1.0 + 0.25)
    assert seen.tokens_per_second == pytest.approx(8 / 4.75)


def test_clients_share_steps_and_a_full_batch_waits(scale: ModuleType) -> None:
    costs = scale.Costs({1: 1.0, 2: 1.0}, 0.0, 0.0, (10,))
    seen = scale.simulate(costs, scale.Load(10, 40, clients=2), 1, 2)
    assert seen.median == pytest.approx(1 + 10.0)  # the step under way, then its own
    assert scale.simulate(costs, scale.Load(10, 40, clients=2), 1, 1).median == pytest.approx(20.0)


def test_random_arrivals_wait_as_a_queue_with_one_server_does(scale: ModuleType) -> None:
    costs = scale.Costs({1: 1.0}, 0.0, 0.0, (1,))
    seen = scale.simulate(costs, scale.Load(1, 60_000, rate=0.5), 1, 1)
    assert seen.tokens_per_second == pytest.approx(0.5, rel=0.03)
    assert 1.0 < seen.median < 2.0  # constant service of 1 s at half load: a mean of 1.5 s
    assert seen.p95 == pytest.approx(3.2, abs=0.4)


def test_acceptance_lengths_have_the_mean_that_is_asked_for(scale: ModuleType) -> None:
    for mean in (1.5, 2.0, 3.0):
        shares = [scale.acceptance_of(length, mean) for length in range(1, scale.DRAFT + 2)]
        assert sum(shares) == pytest.approx(1.0)
        assert sum(by * share for by, share in enumerate(shares, 1)) == pytest.approx(mean)
    assert set(scale.paper(1.0, 0.0).steps) == {scale.ANSWER}


def test_costs_are_found_from_what_clients_waited_for(scale: ModuleType) -> None:
    costs = scale.Costs({1: 1.0, 3: 1.5, 6: 3.0}, 0.0, 0.0, (20, 30, 50), 0.6)
    loads = {clients: scale.Load(96, 400, clients=clients) for clients in (scale.ALONE, *scale.MEASURED)}
    runs = {clients: [scale.simulated(costs, load, scale.WORKERS, scale.LIMIT, 1)] for clients, load in loads.items()}
    found = scale.costs_of(runs, costs.steps)
    for rows, seconds in costs.rows.items():
        assert found.rows[rows] == pytest.approx(seconds, rel=0.1)
    assert found.alone == pytest.approx(0.6, rel=0.1)


def test_a_step_is_faster_while_the_other_worker_is_idle(scale: ModuleType) -> None:
    costs = scale.Costs({1: 1.0}, 0.0, 0.0, (10,), 0.5)
    one, two = (scale.simulate(costs, scale.Load(10, 40, clients=clients), 2, 4) for clients in (1, 2))
    assert (one.median, two.median) == (pytest.approx(5.0), pytest.approx(10.0))


def test_random_arrivals_are_predicted_at_the_times_at_which_they_are_sent(scale: ModuleType) -> None:
    load = scale.Load(1, 50, rate=0.01)
    asked = [begin for begin, _ in scale.simulated(scale.Costs({1: 1.0}, 0.0, 0.0, (1,)), load, 2, 4, seed=7)]
    assert sorted(asked) == pytest.approx(list(accumulate(load.waits(7))))
