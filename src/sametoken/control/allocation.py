"""Which rows draft and how far, such that their tokens take least time. Pure arithmetic on gains and seconds.

All guesses of all rows stand in one list, the one that shortens the wait for a token most first. A path's chance never
grows along it, so each row's guesses stand in their order, and the best set of any size is a beginning of the list.
What is made least is a mean over rows of the time that a token takes, see `POWER`: most tokens per second of the batch
would slow rows with wrong guesses for those with right ones. Legend: R rows, L longest path, K guesses in the list.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sametoken.control.acceptance import Floats
from sametoken.control.batch import POWER, SAVING, ChosenLengths, Whole

# By how much drafts of many rows must promise to be faster to begin, and slower to end: rows that seem alike differ,
# and of drafts that are not made nothing is learned.
MARGIN = 0.03


def allocate(gains: Floats, price: Callable[[Whole, Whole], Floats], drafting: bool = False) -> ChosenLengths:
    """The beginning of the list that makes the wait for a token least; nothing drafted if that does not pay.

    Args:
        gains: [R, L] guesses expected to come true with paths of 1, 2, .. L tokens; a row that may have shorter ones
            only gains nothing beyond.
        price: seconds of the steps that make the first 0, 1, .. K guesses of the list: of their rows and places.
        drafting: whether they draft already.
    """
    rows, longest = gains.shape
    waits = 1.0 / (1.0 + np.concatenate([np.zeros((rows, 1)), gains], axis=1))
    saved = np.minimum.accumulate(-np.diff(waits**POWER, axis=1), axis=1).ravel()
    order = np.argsort(-saved, kind="stable")
    order = order[(1.0 - waits[:, 1:] / waits[:, :-1] > SAVING).ravel()[order]]
    row, place = np.divmod(order, longest)
    seconds = price(row, place)
    left = rows - np.concatenate([[0.0], np.cumsum(saved[order])])
    wait = seconds * left ** (1.0 / POWER)
    margin = MARGIN * (1.0 - 1.0 / rows) * (-1.0 if drafting else 1.0)
    best = int(np.argmin(wait * np.where(np.arange(len(wait)) > 0, 1.0 + margin, 1.0)))
    return ChosenLengths(np.bincount(row[:best], minlength=rows), float(wait[best]), float(seconds[best]))
