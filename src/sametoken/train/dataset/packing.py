"""Packing of samples into rows of at most `capacity` tokens, to fill batches; a new arrangement every epoch.

Pure functions: equal lengths, seed and epoch give equal rows on every machine.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections.abc import Sequence

from sametoken.errors import DataError

WINDOW = 4096  # samples packed together: enough to fill rows, few enough to keep an epoch shuffled


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
