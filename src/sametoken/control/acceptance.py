"""Estimated probability that a draft token is accepted, by its place on the path.

The estimates come from counts that decay exponentially, per request and over all requests. A request without counts
has the estimate of its drafter over all requests; a drafter without counts has `HOPE`. Pure arithmetic. Legend: N
requests, L length of the longest path in tokens.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

HOPE = 0.6  # prior chance of a guess: high enough that drafting starts, low enough that a bad drafter soon stops
PRIOR = 8.0  # weight of the prior, in observations
MEMORY = 100.0  # steps with drafts after which a count over all requests has decayed to 1/e
RECENT = 30.0  # steps, with drafts or without, after which a count of one request has decayed to 1/e: its text changes
_FADE = 1.0 - 1.0 / MEMORY


class Acceptance:
    """Acceptance estimates of one drafter.

    The chance at place k >= 1 is the probability that the k-th guess of a path is accepted if all guesses before it
    were. The chance at place 0 is the probability that the drafter returns a draft.

    Args:
        longest: L, length of the longest path in tokens.

    Attributes:
        engine: chances over all requests, [1 + L].
    """

    def __init__(self, longest: int) -> None:
        # Over all requests, by place: guesses verified, accepted, requested, and returned by the drafter.
        self._tried, self._right, self._asked, self._made = ([0.0] * (longest + 1) for _ in range(4))
        # By request: step of the last update; drafts requested, drafts returned, guesses verified, guesses accepted.
        self._requests: dict[int, tuple[int, Sequence[float]]] = {}
        # Drafts with a rejected guess, those of them with an accepted sibling, guesses of chains, siblings.
        self._beside = [0.0] * 4
        self.engine: Sequence[float] = [HOPE] * (longest + 1)

    @property
    def saved(self) -> float:
        """Probability that a sibling is accepted if the guess of the chain is rejected."""
        return self._beside[1] / (self._beside[0] + PRIOR)

    @property
    def siblings(self) -> float:
        """Mean number of verified siblings per guess of a chain."""
        return self._beside[3] / (self._beside[2] + PRIOR)

    @property
    def kept(self) -> list[float]:
        """Fraction of requested guesses that the drafter returned, by place, [1 + L]."""
        return [(made + PRIOR) / (asked + PRIOR) for asked, made in zip(self._asked, self._made, strict=True)]

    def __len__(self) -> int:
        """Number of requests with counts."""
        return len(self._requests)

    def forget(self, request: int) -> None:
        """Drop the counts of a finished request."""
        self._requests.pop(request, None)

    def _of(self, request: int, now: int) -> Sequence[float]:
        """Counts of a request, decayed to step `now`."""
        when, counts = self._requests.get(request, (now, (0.0,) * 4))
        fade = (1.0 - 1.0 / RECENT) ** (now - when)
        return [fade * count for count in counts]

    def chances(self, request: int, now: int) -> list[float]:
        """Estimated chances of a request in step `now`, [1 + L]."""
        asked, made, tried, right = self._of(request, now)
        there = (made + PRIOR * self.engine[0]) / (asked + PRIOR)
        # The counts of a request are pooled over places: a late place is reached after accepted guesses only, so a
        # request whose first guesses fail has no observations of its own there.
        return [there, *((right + PRIOR * chance) / (tried + PRIOR) for chance in self.engine[1:])]

    def learn(
        self, now: int, requests: Sequence[int], asked: Sequence[int], longest: Sequence[int],
        accepted: Sequence[int], siblings: Sequence[int] = (0,), saved: Sequence[bool] = (False,),
    ) -> None:  # fmt: skip
        """Count the verified drafts of one step, one per request.

        The counts of all places decay, also those of places without new observations: the chance of a place that is no
        longer drafted returns to the prior, and the place is tried again.

        Args:
            now: number of the step.
            requests: identifiers of the N requests, all different.
            asked: requested tokens on a path, [N]; a guess that the drafter did not return counts as rejected.
            longest: tokens on the longest path of each draft, [N]; 0 if the drafter returned no draft.
            accepted: accepted guesses of each chain, without siblings, [N].
            siblings: siblings in each draft, [N].
            saved: true for drafts in which a sibling was accepted in place of the rejected guess, [N].
        """
        counts = self._tried, self._right, self._asked, self._made
        for values in counts:  # once a step: the rows of one batch are correlated
            values[:] = [_FADE * value for value in values]
        for request, most, made, right in zip(requests, asked, longest, accepted, strict=True):
            tried = min(right + 1, most) if made else 0
            seen = 1, made > 0, tried, right if made else 0
            self._requests[request] = now, [a + b for a, b in zip(self._of(request, now), seen, strict=True)]
            for values, last in zip(counts, (tried, right if made else -1, most, made if made else -1), strict=True):
                for place in range(last + 1):
                    values[place] += 1.0
        wrong = sum(right < made for made, right in zip(longest, accepted, strict=True))
        seen_beside = wrong, sum(saved), sum(longest), sum(siblings)
        self._beside = [_FADE * a + b for a, b in zip(self._beside, seen_beside, strict=True)]
        self.engine = self._chances()

    def _chances(self) -> Sequence[float]:
        found, expected = [], HOPE
        for place, (tries, hits) in enumerate(zip(self._tried, self._right, strict=True)):
            # The prior of a place is the chance of the place before it.
            expected = (hits + PRIOR * expected) / (tries + PRIOR)
            found.append(expected)
            expected = HOPE if place == 0 else expected
        return found


class Overlap:
    """Statistics of the longest accepted prefixes of several drafters and of their union, to estimate its gain.

    Args:
        drafters: number of drafters.
        longest: L, length of the longest path in tokens.
    """

    def __init__(self, drafters: int, longest: int) -> None:
        self._drafts = 0.0
        self._held = [[0.0] * longest for _ in range(drafters + 1)]  # drafts with this prefix; last: the union

    def learn(self, accepted: Sequence[int]) -> None:
        """Count one draft position at which all drafters had verified guesses.

        Args:
            accepted: accepted guesses of each drafter, [drafters].
        """
        self._drafts = _FADE * self._drafts + 1.0
        for held, count in zip(self._held, [*accepted, max(accepted)], strict=True):
            held[:] = [_FADE * value + (place < count) for place, value in enumerate(held)]

    @property
    def spread(self) -> float:
        """Gain of the union over the best drafter, as a fraction of the gain of independent drafters.

        It is 0 if all drafters are right at equal positions, and exceeds 1 if some are right where others are wrong.
        """
        more = expected = 0.0
        for *each, union in zip(*self._held, strict=True):
            most = max(1.0, self._drafts)
            more += union - max(each)
            expected += most * (1.0 - math.prod(1.0 - held / most for held in each)) - max(each)
        return (more + 1.0) / (expected + 1.0)


def united(paths: Sequence[Sequence[float]], spread: float) -> list[float]:
    """Estimate the chances that a union of drafts contains the accepted path, [1 + L].

    Args:
        paths: chances of each drafter, [drafters][1 + L].
        spread: see `Overlap`.
    """
    found = []
    for chances in zip(*paths, strict=True):
        best = max(chances)
        learned = best + spread * (1.0 - math.prod(1.0 - chance for chance in chances) - best)
        found.append(min(learned, 1.0, sum(chances)))
    return found


class Gate:
    """Permanent end of speculation if recent requests accepted too few draft tokens, as `acceptance_window` of
    TensorRT-LLM does.

    Args:
        window: number of requests in the rolling average; 0 never closes the gate.
        threshold: least average number of accepted draft tokens per forward with drafts.
    """

    def __init__(self, window: int = 0, threshold: float = 0.0) -> None:
        self.window, self.threshold, self.closed = window, threshold, False
        self._lengths: deque[float] = deque(maxlen=window)

    @property
    def average(self) -> float:
        return sum(self._lengths) / len(self._lengths) if self._lengths else 0.0

    def record(self, accepted: int, forwards: int) -> bool:
        """Record a finished request; return True if it closes the gate.

        Args:
            accepted: its accepted draft tokens.
            forwards: its forwards with drafts.
        """
        if self.closed or not self.window or not forwards:
            return False
        self._lengths.append(accepted / forwards)
        self.closed = len(self._lengths) == self.window and self.average < self.threshold
        return self.closed
