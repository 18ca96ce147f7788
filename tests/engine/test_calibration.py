"""The first measurement of costs: it measures what tells most, and takes a bounded time on slow machines too."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from cli_checks import call
from sametoken.control.cost import Measured
from sametoken.engine import calibration
from sametoken.engine.calibration import COUNTS, Calibration


class Clock:
    """A clock that forwards move: `plain` seconds each, and so much more for each token and each row."""

    def __init__(self, plain: float, token: float, row: float = 0.0) -> None:
        self.now, self.plain, self.token, self.row = 0.0, plain, token, row

    def perf_counter(self) -> float:
        return self.now

    def step(self, rows: int, nodes: int, context: int) -> None:
        self.now += self.plain + self.token * rows * nodes + self.row * rows


def measured(clock: Clock, monkeypatch: pytest.MonkeyPatch, most: int = 512) -> Measured:
    """What a calibration for up to 64 rows and forwards of `most` tokens says if forwards move this clock."""
    runner = SimpleNamespace(
        decoder=SimpleNamespace(config=SimpleNamespace(vocab_size=512)), device=torch.device("cpu")
    )
    work = Calibration(cast(Any, runner), range(64), most, 1024)
    monkeypatch.setattr(calibration, "time", clock)
    monkeypatch.setattr(work, "_step", clock.step)
    return work.measure({}, 4)


@pytest.mark.parametrize("plain", [0.001, 0.004, 0.008, 0.0125, 0.0136, 0.02, 0.05, 0.3, 2.0])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.1])
def test_a_calibration_takes_bounded_time(plain: float, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of a second, or 7 tokens of a slow model, where a forward of 16 tokens takes up to 2.5 plain ones."""
    clock = Clock(plain, share * plain)
    found = measured(clock, monkeypatch)
    assert clock.now <= max(1 / 3, 7.0 * (plain + clock.token))
    assert {1, 16} <= found.step.keys()
    for count, seconds in found.step.items():
        assert 0.0 < seconds <= plain + count * clock.token + 1e-9


def test_a_fast_machine_measures_many_counts_and_a_slow_one_those_that_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(Clock(0.001, 0.00003), monkeypatch).step.keys() == set(COUNTS)
    slow = measured(Clock(0.02, 0.004), monkeypatch).step.keys()
    assert slow & {1, 16, 64} == {1, 16}


@pytest.mark.parametrize("most", [16, 40, 512])
def test_what_a_row_adds_is_measured_however_small_forwards_are(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(Clock(0.001, 0.00003, 0.0001), monkeypatch, most).row == pytest.approx(0.0001)


@pytest.mark.usefixtures("one_thread")
def test_a_command_measures_before_its_first_request(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else drafts seem slow to whoever tries them: 0.3 seconds of measuring for a few tokens."""
    measure, begun = Calibration.measure, list[float]()

    def slow(self: Calibration, *asked: Any) -> Measured:
        begun.append(time.perf_counter())
        time.sleep(2.0)
        return measure(self, *asked)

    monkeypatch.setattr(Calibration, "measure", slow)
    answer = call(capfd, "generate", "--prompt", "Hi", "--max-tokens", "4", "--ignore-eos", "--json")
    assert (answer.code, len(begun)) == (0, 1)
    assert json.loads(answer.out)["seconds"] < 1.5
