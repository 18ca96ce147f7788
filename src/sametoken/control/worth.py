"""Worth of the guesses of one step and of their time in one unit, which decides where each row's chain ends.

A guess is worth the chance that its whole path is accepted, times the weight of its row. That never grows along a
chain, so the guesses that are worth their verification are the first ones of each row. Beside each of them stand the
next candidates of the same draw, its siblings, where they are worth theirs; no guess follows them. The rule is in
kernels/cpu/stop.h.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

UNPRICED = 1e9  # weight of a row whose guesses are made at any cost


def chance_of(table: Sequence[float], share: float, rank: int) -> float:
    """Chance of a candidate from the table of its rank; linear between the middles of the bins."""
    at = min(max(share * (1 + rank) * len(table) - 0.5, 0.0), len(table) - 1.0)
    below = min(int(at), len(table) - 2)
    return table[below] + (at - below) * (table[below + 1] - table[below])


class Time(NamedTuple):
    """The worth of the time to verify a guess, to make one beside others of the same level, and of a draft forward."""

    verify: float
    guess: float
    level: float


class Worth(NamedTuple):
    """Worth of guesses and of time in one step. Legend: R rows, K candidates of a draw.

    Attributes:
        chances: [K][2][bins] chance that a candidate is accepted, by its share: of greedy rows and of sampled ones. The
            bins of candidate k part 0 .. 1 / (1 + k), since those before it have shares that are no smaller.
        typical: [K][2] chance of candidates that were not drawn yet.
        sampled: [R] true for sampled rows.
        weights: [R] weight of a token.
        time: worth of a guess's time.
        siblings: [R] most guesses beside those of the chain; () for none.
    """

    chances: Sequence[Sequence[Sequence[float]]]
    typical: Sequence[Sequence[float]]
    sampled: Sequence[bool]
    weights: Sequence[float]
    time: Time
    siblings: Sequence[int] = ()


class EndedChains(NamedTuple):
    """Candidates of R rows that were drawn, and those that joined the drafts. Legend: L levels, K candidates of a draw.

    Attributes:
        made: [R] levels that were drawn.
        kept: [R][L] candidates of each level that joined, the guess of the chain and its siblings.
        candidates: [R][L][K] their tokens, best first, negative for none.
    """

    made: Sequence[int]
    kept: Sequence[Sequence[int]]
    candidates: Sequence[Sequence[Sequence[int]]]
