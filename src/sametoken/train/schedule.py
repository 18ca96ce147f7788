"""Schedule of a run as pure functions: the samples in each row, the rows and the learning rate of each step.

There is no state, so a run can continue from the number of a step alone. Every epoch has a new arrangement of samples
in rows of at most `capacity` tokens; equal lengths, seed and epoch give equal rows on every machine.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from sametoken.errors import DataError
from sametoken.train.settings import ROW, RunSettings

WINDOW = 4096  # samples packed together: enough to fill rows, few enough to keep an epoch shuffled
Row = list[int]  # samples packed together


class Step(NamedTuple):
    """Step of the optimiser.

    Attributes:
        number: number of the step, from 0 over the whole run.
        epoch: epoch of the step.
        rows: rows of all processes together.
    """

    number: int
    epoch: int
    rows: list[Row]


def rows_of(lengths: Sequence[int], run: RunSettings, epoch: int) -> list[list[int]]:
    """Rows of an epoch. Without a given row length, a sample longer than `ROW` is a separate row.

    Raises:
        DataError: a sample is longer than the given row length.
    """
    given = run.training_seq_len
    bounded = lengths if given else [min(length, ROW) for length in lengths]
    return pack(bounded, given or ROW, seed=run.seed, epoch=epoch)


def rows_per_step(run: RunSettings, processes: int) -> int:
    """Rows per step of all processes together, of a filled plan."""
    return (run.train_bs or 1) * (run.gradient_accumulation_steps or 1) * processes


def steps_of_run(run: RunSettings, rows: int, processes: int) -> int:
    """Steps of a run with this number of rows per epoch, of a filled plan."""
    whole, left = divmod(rows, rows_per_step(run, processes))
    steps = max(1, round((whole + (left >= processes)) * (run.num_epochs or 1)))
    return steps if run.max_steps is None else min(steps, run.max_steps)


class Schedule:
    """Steps of a run.

    Args:
        lengths: number of tokens of each sample.
        settings: settings of the run, from `defaults.filled`.
        processes: number of processes that share each step.

    Raises:
        DataError: the data are too few for the number of processes, or a sample is longer than a row.
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
        """Yield the steps from number `first` to the end."""
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
        """Learning rate of a step."""
        settings = self._settings
        assert settings.lr is not None
        warm = settings.warmup_steps if settings.warmup_steps is not None else round(settings.warmup_ratio * self.total)
        if step < warm:
            return settings.lr * (step + 1) / warm
        done = (step - warm) / max(1, self.total - warm)
        factor = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}
        return settings.lr * factor[settings.lr_scheduler_type]

    def _epoch(self, epoch: int) -> list[list[Row]]:
        """Rows of an epoch by step; the last step may have fewer, but at least one per process."""
        rows = rows_of(self._lengths, self._settings, epoch)
        groups = [rows[i : i + self.rows_per_step] for i in range(0, len(rows), self.rows_per_step)]
        return [group for group in groups if len(group) >= self._processes]


def pack(
    lengths: Sequence[int], capacity: int, *, seed: int = 0, epoch: int = 0, window: int = WINDOW
) -> list[list[int]]:
    """Rows of sample numbers; every sample is in exactly one row, and no row is longer than `capacity` tokens.

    Samples are shuffled, then each window of samples is packed longest first into the fullest row with enough room,
    and the rows are shuffled.

    Args:
        lengths: number of tokens of each sample.
        capacity: number of tokens of a row.
        seed, epoch: seeds of the order.

    Raises:
        DataError: a sample is longer than a row.
    """
    too_long = next((i for i, length in enumerate(lengths) if length > capacity), None)
    if too_long is not None:
        raise DataError(
            f"sample {too_long} has {lengths[too_long]} tokens, a row only {capacity}; make rows longer, or prepare "
            f"the data with --max-len {capacity}"
        )
    generator = random.Random(f"pack {seed} {epoch}")
    order = list(range(len(lengths)))
    generator.shuffle(order)
    rows = [
        row for start in range(0, len(order), window) for row in _fill(order[start : start + window], lengths, capacity)
    ]
    generator.shuffle(rows)
    return rows


def _fill(samples: Sequence[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack by best fit, longest first."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # free tokens and row, ascending
    for sample in sorted(samples, key=lambda i: -lengths[i]):
        at = bisect_left(room, (lengths[sample], -1))
        left, row = room.pop(at) if at < len(room) else (capacity, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(sample)
        insort(room, (left - lengths[sample], row))
    return rows
