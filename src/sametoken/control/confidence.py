"""Chances that a drafter's guesses are accepted, from its own scores, and counts of how often they were.

A share tells how clearly a guess won the drafter's own draw. For each drafter, tables for greedy and for sampled rows
map shares to chances; a higher share never has a lower chance. They are fitted to the target's draws at the places that
verified guesses reached, where each candidate was right or wrong. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sametoken.control.acceptance import PRIOR
from sametoken.control.worth import chance_of

BINS = 10  # of shares and of chances, all equally wide
RANKS = 6  # candidates of a draw that are looked at: the next one comes true less than 2 % of the time


def bin_of(value: float) -> int:
    """Index of the bin of a value in 0 .. 1."""
    return min(int(value * BINS), BINS - 1)


def _zeros() -> list[float]:
    return [0.0] * BINS


@dataclass
class Reliability:
    """Verified guesses by the chance that was expected of each, [BINS] each.

    Attributes:
        tried: guesses whose path was accepted so far.
        expected: the sum of their chances.
        accepted: number of them that were accepted.
    """

    tried: list[float] = field(default_factory=_zeros)
    expected: list[float] = field(default_factory=_zeros)
    accepted: list[float] = field(default_factory=_zeros)

    def see(self, chance: float, right: bool) -> None:
        """Count one verified guess."""
        place = bin_of(chance)
        self.tried[place] += 1
        self.expected[place] += chance
        self.accepted[place] += right

    def add(self, other: Reliability) -> None:
        """Add the counts of another record."""
        for mine, theirs in zip(
            (self.tried, self.expected, self.accepted), (other.tried, other.expected, other.accepted), strict=True
        ):
            mine[:] = [a + b for a, b in zip(mine, theirs, strict=True)]


class Confidence:
    """The calibration of one drafter: tables by the rank of a candidate and the kind of row; places are bins of shares.

    The best candidate of a draw is the guess of the chain, the others may stand beside it. Of rank k, 0 for the best,
    shares are at most 1 / (1 + k), which the bins part.
    """

    def __init__(self) -> None:
        self._tries, self._hits = ([[_zeros(), _zeros()] for _ in range(RANKS)] for _ in range(2))
        self._tables = [[_rising(_zeros(), _zeros(), rank)] * 2 for rank in range(RANKS)]
        self._drafts = self._due = 0.0

    @property
    def tables(self) -> Sequence[Sequence[Sequence[float]]]:
        """Chances [RANKS][2][BINS] at the middles of the bins: of greedy rows, of sampled ones."""
        return self._tables

    @property
    def typical(self) -> list[list[float]]:
        """Chance [RANKS][2] of a candidate that was not drawn yet, if the guesses before it are accepted."""
        return [
            [(sum(hits) + PRIOR / 2 / (1 + rank)) / (sum(tries) + PRIOR) for tries, hits in zip(*each, strict=True)]
            for rank, each in enumerate(zip(self._tries, self._hits, strict=True))
        ]

    def chance(self, share: float, sampled: bool, rank: int = 0) -> float:
        """Chance that a candidate is accepted if the guesses before it were."""
        return chance_of(self._tables[rank][sampled], share, rank)

    def learn(
        self, shares: Sequence[Sequence[float]], sampled: bool, drawn: Sequence[int], kept: Sequence[int],
        seen: Reliability,
    ) -> None:  # fmt: skip
        """Learn from a verified chain of guesses.

        Args:
            shares: of the candidates of each place, best first.
            drawn: rank of the accepted candidate at each place that was reached; a rank that no candidate has for none.
            kept: candidates of each place that were verified.
            seen: updated with the expected chance and the outcome of each guess that was reached.
        """
        for candidates, right, verified in zip(shares, drawn, kept, strict=False):
            least = 1.0
            for rank, share in enumerate(candidates[:verified]):
                least = min(least, self.chance(share, sampled, rank))
                seen.see(least, rank == right)
            for rank, share in enumerate(candidates):
                self._tries[rank][sampled][bin_of(share * (1 + rank))] += 1
            if right < len(candidates):
                self._hits[right][sampled][bin_of(candidates[right] * (1 + right))] += 1
        self._drafts += 1.0
        if self._drafts >= self._due:  # ever rarer, as a draft tells ever less
            self._due = self._drafts * (1.0 + 1.0 / PRIOR)
            kinds = zip(self._tries, self._hits, strict=True)
            self._tables = [[*map(_rising, *each, (rank, rank))] for rank, each in enumerate(kinds)]


def _rising(tries: Sequence[float], hits: Sequence[float], rank: int) -> list[float]:
    """Rates of the bins, neighbours pooled until none falls (least squares under that condition)."""
    pools: list[tuple[float, float, int]] = []  # tries, hits, bins
    for place, (tried, right) in enumerate(zip(tries, hits, strict=True)):
        pool = tried + PRIOR, right + PRIOR * (place + 0.5) / BINS / (1 + rank), 1
        while pools and pools[-1][1] * pool[0] > pool[1] * pools[-1][0]:
            before = pools.pop()
            pool = before[0] + pool[0], before[1] + pool[1], before[2] + pool[2]
        pools.append(pool)
    return [right / tried for tried, right, bins in pools for _ in range(bins)]
