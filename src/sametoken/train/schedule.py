"""The course of a run as pure functions: which rows a step trains on, and at which learning rate.

Nothing here has state, so going on from a step needs nothing but its number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from sametoken.data.packing import pack
from sametoken.errors import DataError
from sametoken.train.settings import RunSettings

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


class Course:
    """The steps of a run.

    Args:
        lengths: tokens of each sample.
        settings: of the run.
        processes: how many share each step.

    Raises:
        DataError: the data are too few for so many processes, or a sample is longer than a row.
    """

    def __init__(self, lengths: Sequence[int], settings: RunSettings, processes: int) -> None:
        self._lengths, self._settings, self._processes = lengths, settings, processes
        self.rows_per_step = settings.train_bs * settings.gradient_accumulation_steps * processes
        steps = len(self._epoch(0))
        if not steps:
            raise DataError(
                f"{len(lengths)} samples fill fewer than {processes} rows of {settings.training_seq_len} tokens, one "
                "per process; add data, shorten the rows or use fewer processes"
            )
        self.total = max(1, round(steps * settings.num_epochs))
        if settings.max_steps is not None:
            self.total = min(self.total, settings.max_steps)

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
        warm = settings.warmup_steps if settings.warmup_steps is not None else round(settings.warmup_ratio * self.total)
        if step < warm:
            return settings.lr * (step + 1) / warm
        done = (step - warm) / max(1, self.total - warm)
        factor = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}
        return settings.lr * factor[settings.lr_scheduler_type]

    def _epoch(self, epoch: int) -> list[list[Row]]:
        """An epoch's rows by step; a last step may have fewer, but one for each process."""
        rows = pack(self._lengths, self._settings.training_seq_len, seed=self._settings.seed, epoch=epoch)
        groups = [rows[i : i + self.rows_per_step] for i in range(0, len(rows), self.rows_per_step)]
        return [group for group in groups if len(group) >= self._processes]
