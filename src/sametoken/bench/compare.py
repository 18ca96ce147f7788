"""Comparison of two sets of runs: ratio of their speeds for every common setting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from sametoken.bench.record import Run
from sametoken.bench.tables import Table
from sametoken.errors import ConfigError


class SpeedOfRounds(NamedTuple):
    """Tokens per second of one setting, over all rounds and of each round."""

    speed: float
    rounds: tuple[float, ...]

    @classmethod
    def of(cls, speed: float, round_s: Sequence[float]) -> SpeedOfRounds:
        """Speeds of the rounds, from the speed over all rounds and the seconds of each."""
        mean = sum(round_s) / len(round_s)
        return cls(speed, tuple(speed * mean / seconds for seconds in round_s))


class Ratio(NamedTuple):
    """One setting in both sets.

    Attributes:
        name: description of the setting.
        first: tokens per second in the first set.
        second: tokens per second in the second set.
        ratio: second / first.
        low: smallest ratio of any two rounds.
        high: largest ratio of any two rounds.
    """

    name: str
    first: float
    second: float
    ratio: float
    low: float
    high: float

    def to_json(self) -> dict[str, Any]:
        """JSON object of `sametoken bench compare --json`."""
        return self._asdict()


def compare(first: Sequence[Run], second: Sequence[Run]) -> list[Ratio]:
    """Ratios of the common settings, in the order of the first set; the newest of several runs of a setting counts.

    Raises:
        ConfigError: no setting is in both sets.
    """
    ours, theirs = dict(_settings(first)), dict(_settings(second))
    found = [_ratio(name, ours[name], theirs[name]) for name in ours if name in theirs]
    if not found:
        raise ConfigError(
            f"no setting is in both: the first has {'; '.join(ours)}, the second {'; '.join(theirs)}; measure the same "
            "workload, temperature, batch and drafts"
        )
    return found


def table(found: Sequence[Ratio]) -> Table:
    """Table of the ratios."""
    rows = [
        (each.name, f"{each.first:.1f}", f"{each.second:.1f}", f"{each.ratio:.2f}x ({each.low:.2f} to {each.high:.2f})")
        for each in found
    ]
    return Table(
        "tokens per second; in brackets the smallest and largest ratio of any two rounds",
        ("setting", "A", "B", "B / A"),
        rows,
    )


def _settings(runs: Sequence[Run]) -> Iterator[tuple[str, SpeedOfRounds]]:
    for run in runs:
        for cell in run.cells:
            for one in cell.variants:
                yield f"{cell.label}, {one.label}", SpeedOfRounds.of(one.tokens_per_second, one.round_s)
        for load in run.loads:
            if load.tokens:
                name = f"{load.workload}, temperature {load.temperature:g}, {load.label}, {load.side}"
                yield name, SpeedOfRounds.of(load.tokens_per_second, load.round_s)


def _ratio(name: str, first: SpeedOfRounds, second: SpeedOfRounds) -> Ratio:
    low, high = min(second.rounds) / max(first.rounds), max(second.rounds) / min(first.rounds)
    return Ratio(name, first.speed, second.speed, second.speed / first.speed, low, high)
