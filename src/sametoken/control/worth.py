"""What guesses of one step are worth, and what their time is worth in the same unit: where each row's chain ends.

A guess is worth the chance that its whole path comes true times the weight of its row. That never grows along a chain,
so the guesses that are worth their verification are the first ones of each row. The rule is in kernels/cpu/stop.h.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

UNPRICED = 1e9  # weight of a row whose guesses are made whatever they cost


class Time(NamedTuple):
    """The worth of the time to verify a guess, to make one beside others of the same level, and of a draft forward."""

    verify: float
    guess: float
    level: float


class Worth(NamedTuple):
    """Legend: R rows.

    Attributes:
        chances: [2][bins] that a guess comes true, by its share: of greedy rows and of sampled ones.
        typical: [2] the same of a guess that was not made yet.
        sampled: [R] which of the two holds.
        weights: [R] of a token.
        time: of what a guess takes.
    """

    chances: Sequence[Sequence[float]]
    typical: Sequence[float]
    sampled: Sequence[bool]
    weights: Sequence[float]
    time: Time
