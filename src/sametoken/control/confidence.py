"""Turns a drafter's own scores into chances that its guesses are accepted, and counts how often they were.

A share says how clearly a guess won the drafter's own draw. Per drafter one table for greedy rows and one for sampled
ones turns shares into chances; in neither has a higher share a lower chance. Both are learned from verified guesses.
Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

BINS = 10  # of shares and of chances, all equally wide
PRIOR = 4.0  # verified guesses for which the share itself counts in each bin of a table
SETTLE = 8  # drafts after which a table is made anew


def bin_of(value: float) -> int:
    """The bin of a value in 0 .. 1."""
    return min(int(value * BINS), BINS - 1)


def _zeros() -> list[float]:
    return [0.0] * BINS


@dataclass
class Reliability:
    """Verified guesses by the chance that was expected of each, [BINS] each.

    Attributes:
        tried: guesses whose path had come true so far.
        expected: the sum of their chances.
        accepted: how many of them came true.
    """

    tried: list[float] = field(default_factory=_zeros)
    expected: list[float] = field(default_factory=_zeros)
    accepted: list[float] = field(default_factory=_zeros)

    def see(self, chance: float, right: bool) -> None:
        """One guess was verified."""
        place = bin_of(chance)
        self.tried[place] += 1
        self.expected[place] += chance
        self.accepted[place] += right

    def add(self, other: Reliability) -> None:
        """Adds the guesses of others."""
        for mine, theirs in zip(
            (self.tried, self.expected, self.accepted), (other.tried, other.expected, other.accepted), strict=True
        ):
            mine[:] = [a + b for a, b in zip(mine, theirs, strict=True)]


class Confidence:
    """The calibration of one drafter. In each table the place is the bin of the share."""

    def __init__(self) -> None:
        middles = [(place + 0.5) / BINS for place in range(BINS)]
        self._tables = [middles, middles]
        self._tries, self._hits = [_zeros(), _zeros()], [_zeros(), _zeros()]
        self._drafts = 0

    @property
    def tables(self) -> Sequence[Sequence[float]]:
        """[2][BINS] chances at the middles of the bins: of greedy rows, of sampled ones."""
        return self._tables

    @property
    def typical(self) -> list[float]:
        """[2] the chance of a guess that was not made yet, if those before it come true."""
        return [
            (sum(hits) + PRIOR / 2) / (sum(tries) + PRIOR) for tries, hits in zip(self._tries, self._hits, strict=True)
        ]

    def chance(self, share: float, sampled: bool) -> float:
        """That a guess comes true if those before it did; linear between the middles of the bins."""
        table, at = self._tables[sampled], min(max(share * BINS - 0.5, 0.0), BINS - 1.0)
        below = min(int(at), BINS - 2)
        return table[below] + (at - below) * (table[below + 1] - table[below])

    def learn(self, shares: Sequence[float], sampled: bool, accepted: int, seen: Reliability) -> None:
        """A chain of guesses with these shares was verified.

        Args:
            accepted: guesses that came true.
            seen: gets what was expected of each guess that was reached, and what became of it.
        """
        tries, hits = self._tries[sampled], self._hits[sampled]
        for place, share in enumerate(shares[: accepted + 1]):
            right, at = place < accepted, bin_of(share)
            seen.see(self.chance(share, sampled), right)
            tries[at] += 1
            hits[at] += right
        self._drafts += 1
        if self._drafts % SETTLE == 0:
            for which in (False, True):
                self._tables[which] = self._rising(which)

    def _rising(self, sampled: bool) -> list[float]:
        """The rates of the bins, neighbours pooled until none falls (least squares under that condition)."""
        pools: list[tuple[float, float, int]] = []  # tries, hits, bins
        for place, (tries, hits) in enumerate(zip(self._tries[sampled], self._hits[sampled], strict=True)):
            pool = tries + PRIOR, hits + PRIOR * (place + 0.5) / BINS, 1
            while pools and pools[-1][1] * pool[0] > pool[1] * pools[-1][0]:
                before = pools.pop()
                pool = before[0] + pool[0], before[1] + pool[1], before[2] + pool[2]
            pools.append(pool)
        return [hits / tries for tries, hits, bins in pools for _ in range(bins)]
