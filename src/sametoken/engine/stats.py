"""Statistics of speculation for one request or several: forwards, drafts, accepted tokens and times."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from sametoken.control.confidence import BINS, bin_of


@dataclass
class Reliability:
    """Verified guesses by expected chance, for a reliability diagram.

    Attributes:
        tried: number of guesses after an accepted prefix, [BINS].
        expected: sum of their expected chances, [BINS].
        accepted: number of accepted ones, [BINS].
    """

    tried: list[float] = field(default_factory=lambda: [0.0] * BINS)
    expected: list[float] = field(default_factory=lambda: [0.0] * BINS)
    accepted: list[float] = field(default_factory=lambda: [0.0] * BINS)

    def see(self, chance: float, right: bool) -> None:
        """Count one verified guess."""
        place = bin_of(chance)
        self.tried[place] += 1
        self.expected[place] += chance
        self.accepted[place] += right

    def add(self, other: Reliability) -> None:
        """Add the counts of `other`."""
        for mine, theirs in zip(
            (self.tried, self.expected, self.accepted), (other.tried, other.expected, other.accepted), strict=True
        ):
            mine[:] = [a + b for a, b in zip(mine, theirs, strict=True)]


@dataclass(slots=True)
class SpeculationStats:
    """Statistics of speculation for one request.

    Attributes:
        method: drafting method, or "none".
        target_forwards: number of forwards of the target that emitted tokens of the request.
        emitted: number of emitted tokens.
        drafted: number of draft tokens (nodes of trees).
        accepted: number of draft tokens that became output.
        accepted_lengths: number of forwards by accepted draft tokens.
        emitted_lengths: number of forwards by emitted tokens: accepted ones and one more, unless the text ended.
        drafted_lengths: number of forwards by longest path of the draft, in tokens; 0 is a plain forward.
        tried: number of forwards by reached position of a guess, all guesses before which were accepted.
        drafted_by: number of forwards with a draft, by drafter: the first one that guessed the accepted path.
        plain: number of forwards without a draft although the request may be drafted, by reason: "gain" (not expected
            to pay), "silent" (the drafter had no guess), "room" (no pages or tokens left in the step), "end" (one token
            left), "recall" (to measure a plain step), "batch" (above the schedule) or "threshold" (too few accepted).
        reliability: expected acceptance of the guesses, by drafter that reports shares of its candidates.
        draft_s: seconds of drafts in the steps with this request.
        verify_s: seconds of the target in the steps with this request.
        other_s: other seconds of the steps with this request.
    """

    method: str
    target_forwards: int = 0
    emitted: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_lengths: list[int] = field(default_factory=list)
    emitted_lengths: list[int] = field(default_factory=list)
    drafted_lengths: list[int] = field(default_factory=list)
    tried: list[int] = field(default_factory=list)
    drafted_by: dict[str, int] = field(default_factory=dict)
    plain: dict[str, int] = field(default_factory=dict)
    reliability: dict[str, Reliability] = field(default_factory=dict)
    draft_s: float = 0.0
    verify_s: float = 0.0
    other_s: float = 0.0

    def charge(self, draft_s: float, verify_s: float, other_s: float) -> None:
        """Add the seconds of one step."""
        self.draft_s += draft_s
        self.verify_s += verify_s
        self.other_s += other_s

    def count(self, emitted: int, drafted: int, accepted: int, longest: int) -> None:
        """Add one forward; `longest` is the longest path of its draft."""
        self.target_forwards += 1
        self.emitted += emitted
        self.drafted += drafted
        self.accepted += accepted
        _tally(self.accepted_lengths, accepted)
        _tally(self.emitted_lengths, emitted)
        _tally(self.drafted_lengths, longest)
        for position in range(min(accepted + 1, longest)):
            _tally(self.tried, position)

    def count_draft(self, drafter: str | None, reason: str) -> None:
        """Count the drafter of a decoding forward, or the reason for a forward without a draft."""
        counts, key = (self.plain, reason) if drafter is None else (self.drafted_by, drafter)
        counts[key] = counts.get(key, 0) + 1

    def seen_of(self, drafter: str) -> Reliability:
        """Expected acceptance of the guesses of a drafter, to be updated by the caller."""
        return self.reliability.setdefault(drafter, Reliability())

    @property
    def drafts(self) -> int:
        """Number of forwards with a draft."""
        return sum(self.drafted_lengths[1:])

    def add(self, other: SpeculationStats) -> None:
        """Add the statistics of another request; the method is unchanged."""
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            if each.name == "reliability":
                for drafter, seen in list(theirs.items()):
                    self.seen_of(drafter).add(seen)
            elif isinstance(mine, int | float):
                setattr(self, each.name, mine + theirs)
            elif isinstance(mine, list):
                for index, count in enumerate(list(theirs)):
                    _tally(mine, index, count)
            elif isinstance(mine, dict):
                for key, count in list(theirs.items()):
                    mine[key] = mine.get(key, 0) + count

    @classmethod
    def total(cls, stats: Iterable[SpeculationStats]) -> SpeculationStats:
        """Sum of the statistics of several requests."""
        found = cls("")
        for each in stats:
            found.add(each)
        return found

    def to_json(self) -> dict[str, Any]:
        """Documented JSON object of statistics."""
        return {
            "method": self.method,
            "target_forwards": self.target_forwards,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance_length": self.acceptance_length,
            "tokens_per_draft": self.tokens_per_draft,
            "acceptance_rate": self.acceptance_rate,
            "accepted_lengths": list(self.accepted_lengths),
            "drafted_by": dict(self.drafted_by),
            "plain": dict(self.plain),
            "draft_s": self.draft_s,
            "verify_s": self.verify_s,
            "other_s": self.other_s,
        }

    @property
    def acceptance_length(self) -> float:
        """Tokens per target forward; every forward that emitted counts, also the prompt's and those without a draft."""
        return self.emitted / self.target_forwards if self.target_forwards else 0.0

    @property
    def tokens_per_draft(self) -> float:
        """1 + accepted / drafts, vLLM's acceptance length; only forwards with a draft count; 0.0 without drafts."""
        return 1 + self.accepted / self.drafts if self.drafts else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted tokens."""
        return self.accepted / self.drafted if self.drafted else 0.0


def _tally(counts: list[int], index: int, more: int = 1) -> None:
    """Add to the count at `index` of a list, which grows as needed."""
    if index >= len(counts):
        counts.extend([0] * (index + 1 - len(counts)))
    counts[index] += more
