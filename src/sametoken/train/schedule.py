"""A run step by step as pure functions: the rows of a step and its learning rate.

Nothing here has state, so a run can go on from a step with nothing but its number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from sametoken.errors import DataError
from sametoken.train.dataset.packing import pack
from sametoken.train.settings import ROW, RunSettings

Row = list[int]  # samples that are packed together


class Step(NamedTuple):
    """One step of the optimiser.

    Attributes:
        number: from 0 over the whole run. `epoch`: it belongs to.
        rows: of all processes together.
    """

    number: int
    epoch: int
    rows: list[Row]


def rows_of(lengths: Sequence[int], run: RunSettings, epoch: int) -> list[list[int]]:
    """An epoch's rows. Where no length of a row was given, a sample that is longer than `ROW` is a row of its own.

    Raises:
        DataError: a sample is longer than the length that was given.
    """
    given = run.training_seq_len
    bounded = lengths if given else [min(length, ROW) for length in lengths]
    return pack(bounded, given or ROW, seed=run.seed, epoch=epoch)


def rows_per_step(run: RunSettings, processes: int) -> int:
    """Rows of a step of all processes together; the plan is filled."""
    return (run.train_bs or 1) * (run.gradient_accumulation_steps or 1) * processes


def steps_of_run(run: RunSettings, rows: int, processes: int) -> int:
    """Steps of a run whose epochs have so many rows; the plan is filled."""
    whole, left = divmod(rows, rows_per_step(run, processes))
    steps = max(1, round((whole + (left >= processes)) * (run.num_epochs or 1)))
    return steps if run.max_steps is None else min(steps, run.max_steps)


class Schedule:
    """The steps of a run.

    Args:
        lengths: tokens of each sample.
        settings: of the run, from `defaults.filled`.
        processes: how many share each step.

    Raises:
        DataError: the data are too few for so many processes, or a sample is longer than a row.
    """

    def __init__(self, lengths: Sequence[int], settings: RunSettings, processes: int) -> None:
        self._lengths, self._settings, self._processes = lengths, settings, processes
        self.rows_per_step = rows_per_step(settings, processes)
        steps = len(self._epoch(0))
        if not steps:
            raise DataError(
                f"{len(lengths)} samples fill fewer than {processes} rows of {settings.training_seq_len or ROW} "
                "tokens, one per process; add data, shorten the rows or use fewer processes"
            )
        self.total = steps_of_run(settings, len(rows_of(lengths, settings, 0)), processes)

    def steps(self, first: int) -> Iterator[Step]:
        """The steps from number `first` to the end."""
        number = epoch = 0
        while number < self.total:
            groups = self._epoch(epoch)
            for rows in groups[max(0, first - number) :]:
                at = max(number, first)
                if at >= self.total:
                    return
                yield Step(at, epoch, rows)
                first = at + 1
            number, epoch = number + len(groups), epoch + 1

    def rate(self, step: int) -> float:
        """The learning rate of a step."""
        settings = self._settings
        assert settings.lr is not None
        warm = settings.warmup_steps if settings.warmup_steps is not None else round(settings.warmup_ratio * self.total)
        if step < warm:
            return settings.lr * (step + 1) / warm
        done = (step - warm) / max(1, self.total - warm)
        factor = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}
        return settings.lr * factor[settings.lr_scheduler_type]

    def _epoch(self, epoch: int) -> list[list[Row]]:
        """An epoch's rows by step; a last step may have fewer, but one for each process."""
        rows = rows_of(self._lengths, self._settings, epoch)
        groups = [rows[i : i + self.rows_per_step] for i in range(0, len(rows), self.rows_per_step)]
        return [group for group in groups if len(group) >= self._processes]
