"""Worth of draft tokens and of time in one unit, by which a drafter ends the chain of each row.

The worth of a guess is the probability that its whole path is accepted, times the weight of its row. It never grows
along a chain, so the guesses that are worth the time of their verification are a prefix of the chain. The next
candidates of the same draw are added as siblings if they are worth their time as well; no guess follows a sibling. The
rule is implemented in kernels/cpu/stop.h.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

UNPRICED = 1e9  # weight of a row whose guesses are never left out


def chance_of(table: Sequence[float], share: float, rank: int) -> float:
    """Acceptance probability of a candidate from the table of its rank, linear between the middles of the bins.

    Args:
        table: probabilities at the middles of the bins, [bins].
        share: confidence of the drafter in the candidate, at most 1 / (1 + `rank`).
        rank: rank of the candidate in its draw, 0 for the best.
    """
    at = min(max(share * (1 + rank) * len(table) - 0.5, 0.0), len(table) - 1.0)
    below = min(int(at), len(table) - 2)
    return table[below] + (at - below) * (table[below + 1] - table[below])


class Time(NamedTuple):
    """Worth of the time of the parts of a draft.

    Attributes:
        verify: worth of the time to verify one guess.
        guess: worth of the time to draft one more row at a level that runs anyway.
        level: worth of the fixed time of one draft forward.
    """

    verify: float
    guess: float
    level: float


class Worth(NamedTuple):
    """Worth of guesses and of time in one step. Legend: R rows, K candidates of a draw.

    Attributes:
        chances: acceptance probability of a candidate by its share, for greedy and for sampled rows, [K][2][bins]. The
            bins of candidate k divide 0 .. 1 / (1 + k), the possible shares of the k-th best of a draw.
        typical: acceptance probability of a candidate of unknown share, [K][2].
        sampled: true for sampled rows, [R].
        weights: worth of an accepted token, [R].
        time: worth of the time of a draft.
        siblings: greatest number of siblings of each row, [R]; () for none.
    """

    chances: Sequence[Sequence[Sequence[float]]]
    typical: Sequence[Sequence[float]]
    sampled: Sequence[bool]
    weights: Sequence[float]
    time: Time
    siblings: Sequence[int] = ()


class EndedChains(NamedTuple):
    """Candidates drawn by a drafter, and those kept in its drafts. Legend: R rows, L levels, K candidates of a draw.

    Attributes:
        made: number of levels that were drawn, [R].
        kept: number of candidates of each level in the draft, the guess of the chain and its siblings, [R][L].
        candidates: token ids, best first, [R][L][K]; negative for none.
    """

    made: Sequence[int]
    kept: Sequence[Sequence[int]]
    candidates: Sequence[Sequence[Sequence[int]]]
