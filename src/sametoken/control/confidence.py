"""Calibration of drafters: acceptance probability of a guess from the confidence of the drafter.

The confidence (share) of a candidate is its part of the drafter's own draw. For each drafter, tables for greedy and for
sampled rows map shares to probabilities, and are monotonic. They are fitted to the tokens that the target drew at
verified places, where each candidate was either right or wrong. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sametoken.control.acceptance import PRIOR
from sametoken.control.worth import chance_of

BINS = 10  # number of bins of shares and of chances, all equally wide
RANKS = 6  # candidates of a draw with tables: the next one is accepted less than 2 % of the time


def bin_of(value: float) -> int:
    """Index of the bin of a value in 0 .. 1."""
    return min(int(value * BINS), BINS - 1)


def _zeros() -> list[float]:
    return [0.0] * BINS


class Confidence:
    """Calibration tables of one drafter, by rank of a candidate, kind of row (greedy or sampled) and bin of its share.

    The candidate of rank 0 is the guess of the chain; those of higher ranks can become its siblings. A share of rank k
    is at most 1 / (1 + k), so the bins of rank k divide 0 .. 1 / (1 + k).
    """

    def __init__(self) -> None:
        self._tries, self._hits = ([[_zeros(), _zeros()] for _ in range(RANKS)] for _ in range(2))
        self._tables = [[_rising(_zeros(), _zeros(), rank)] * 2 for rank in range(RANKS)]
        self._drafts = self._due = 0.0

    @property
    def tables(self) -> Sequence[Sequence[Sequence[float]]]:
        """Chances at the middles of the bins, for greedy and for sampled rows, [RANKS][2][BINS]."""
        return self._tables

    @property
    def typical(self) -> list[list[float]]:
        """Mean chance of a candidate of unknown share, for greedy and for sampled rows, [RANKS][2]."""
        return [
            [(sum(hits) + PRIOR / 2 / (1 + rank)) / (sum(tries) + PRIOR) for tries, hits in zip(*each, strict=True)]
            for rank, each in enumerate(zip(self._tries, self._hits, strict=True))
        ]

    def chance(self, share: float, sampled: bool, rank: int = 0) -> float:
        """Chance that a candidate is accepted if all guesses before it were."""
        return chance_of(self._tables[rank][sampled], share, rank)

    def learn(
        self, shares: Sequence[Sequence[float]], sampled: bool, drawn: Sequence[int], kept: Sequence[int],
        see: Callable[[float, bool], None],
    ) -> None:  # fmt: skip
        """Learn from a verified chain of guesses.

        Args:
            shares: shares of the candidates at each place, best first.
            sampled: true for a sampled row.
            drawn: rank of the accepted candidate at each place that was reached; if none was accepted, a number that
                exceeds all ranks.
            kept: number of verified candidates at each place.
            see: function that receives the expected chance and the outcome of each verified candidate.
        """
        for candidates, right, verified in zip(shares, drawn, kept, strict=False):
            least = 1.0
            for rank, share in enumerate(candidates[:verified]):
                least = min(least, self.chance(share, sampled, rank))
                see(least, rank == right)
            for rank, share in enumerate(candidates):
                self._tries[rank][sampled][bin_of(share * (1 + rank))] += 1
            if right < len(candidates):
                self._hits[right][sampled][bin_of(candidates[right] * (1 + right))] += 1
        self._drafts += 1.0
        if self._drafts >= self._due:  # at growing intervals: each draft changes the tables less
            self._due = self._drafts * (1.0 + 1.0 / PRIOR)
            kinds = zip(self._tries, self._hits, strict=True)
            self._tables = [[*map(_rising, *each, (rank, rank))] for rank, each in enumerate(kinds)]


def _rising(tries: Sequence[float], hits: Sequence[float], rank: int) -> list[float]:
    """Rates of the bins by isotonic regression: neighbours are pooled until no rate falls."""
    pools: list[tuple[float, float, int]] = []  # tries, hits, bins
    for place, (tried, right) in enumerate(zip(tries, hits, strict=True)):
        pool = tried + PRIOR, right + PRIOR * (place + 0.5) / BINS / (1 + rank), 1
        while pools and pools[-1][1] * pool[0] > pool[1] * pools[-1][0]:
            before = pools.pop()
            pool = before[0] + pool[0], before[1] + pool[1], before[2] + pool[2]
        pools.append(pool)
    return [right / tried for tried, right, bins in pools for _ in range(bins)]
