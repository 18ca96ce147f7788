"""Estimated chance that a guess is accepted, by its place on the path: fading counts, of each request and of all.

Pure arithmetic on counts. A request starts with the counts of its drafter over all requests, and the engine with a
chance that is high enough to be tried. Legend: N requests, L longest path.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

HOPE = 0.6  # chance of a guess before anything was seen: high enough to draft, low enough to be dropped soon
PRIOR = 8.0  # weight of the prior, in observations
MEMORY = 100.0  # steps that drafted, after which a count of all requests has faded to 1/e
RECENT = 30.0  # steps after which a count of one request has, drafted or not: what its text is like changes
_FADE = 1.0 - 1.0 / MEMORY


class Acceptance:
    """The guesses of one drafter. Chances are by place, each given that all guesses before it were accepted.

    Place 0 is the chance of a draft at all.

    Args:
        longest: L.

    Attributes:
        engine: [1 + L] chances over all requests.
    """

    def __init__(self, longest: int) -> None:
        # Of all requests, by place: guesses that were tried, that came true, that were asked for and made.
        self._tried, self._right, self._asked, self._made = ([0.0] * (longest + 1) for _ in range(4))
        # By request: the step of its counts; drafts asked for and made; guesses tried, and those that came true.
        self._requests: dict[int, tuple[int, Sequence[float]]] = {}
        # Of drafts whose chain was wrong: how many, and those with a sibling that was right. Guesses, and siblings.
        self._beside = [0.0] * 4
        self.engine: Sequence[float] = [HOPE] * (longest + 1)

    @property
    def saved(self) -> float:
        """Chance that a sibling is right if the guess of the chain is wrong."""
        return self._beside[1] / (self._beside[0] + PRIOR)

    @property
    def siblings(self) -> float:
        """Number of siblings that are verified per guess of a chain."""
        return self._beside[3] / (self._beside[2] + PRIOR)

    @property
    def kept(self) -> list[float]:
        """Rate [1 + L] at which a guess that may be made is there to be verified."""
        return [(made + PRIOR) / (asked + PRIOR) for asked, made in zip(self._asked, self._made, strict=True)]

    def __len__(self) -> int:
        """Number of requests with counts."""
        return len(self._requests)

    def forget(self, request: int) -> None:
        """Drop the counts of a request that ended."""
        self._requests.pop(request, None)

    def _of(self, request: int, now: int) -> Sequence[float]:
        """Counts of a request at this step."""
        when, counts = self._requests.get(request, (now, (0.0,) * 4))
        fade = (1.0 - 1.0 / RECENT) ** (now - when)
        return [fade * count for count in counts]

    def chances(self, request: int, now: int) -> list[float]:
        """Chances [1 + L] of a request in step `now`."""
        asked, made, tried, right = self._of(request, now)
        there = (made + PRIOR * self.engine[0]) / (asked + PRIOR)
        # Far places are reached by good guesses only; a row whose first ones fail is no better at its later ones.
        return [there, *((right + PRIOR * chance) / (tried + PRIOR) for chance in self.engine[1:])]

    def learn(
        self, now: int, requests: Sequence[int], asked: Sequence[int], longest: Sequence[int],
        accepted: Sequence[int], siblings: Sequence[int] = (0,), saved: Sequence[bool] = (False,),
    ) -> None:  # fmt: skip
        """Count verified drafts, one of each of N different requests.

        The counts of all places fade, tried or not, so that the chance of a place once given up recovers and it is
        tried again.

        Args:
            now: the step.
            asked: requested tokens on a path; a guess that was not made counts as rejected.
            longest: tokens on the longest path of each draft, 0 if the drafter had none.
            accepted: accepted guesses, siblings aside.
            siblings: of each draft; `saved`: true if one of them was right after those.
        """
        counts = self._tried, self._right, self._asked, self._made
        for values in counts:  # by step: one batch tells little of the next requests
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
            # A place that was never tried is assumed to continue like the place before it.
            expected = (hits + PRIOR * expected) / (tries + PRIOR)
            found.append(expected)
            expected = HOPE if place == 0 else expected
        return found


class Overlap:
    """Counts of how far several drafters and their union are right, from which the gain of the union follows.

    Args:
        drafters: number of drafters.
        longest: L.
    """

    def __init__(self, drafters: int, longest: int) -> None:
        self._drafts = 0.0
        self._held = [[0.0] * longest for _ in range(drafters + 1)]  # drafts that held a path; in the end all united

    def learn(self, accepted: Sequence[int]) -> None:
        """Count one place at which guesses of all of them were verified; `accepted` of each were right."""
        self._drafts = _FADE * self._drafts + 1.0
        for held, count in zip(self._held, [*accepted, max(accepted)], strict=True):
            held[:] = [_FADE * value + (place < count) for place, value in enumerate(held)]

    @property
    def spread(self) -> float:
        """Gain of a union over the best drafter, relative to the gain of independent drafters: 0 if all are right at
        equal places, more than 1 if one is right where others are wrong.
        """
        more = expected = 0.0
        for *each, union in zip(*self._held, strict=True):
            most = max(1.0, self._drafts)
            more += union - max(each)
            expected += most * (1.0 - math.prod(1.0 - held / most for held in each)) - max(each)
        return (more + 1.0) / (expected + 1.0)


def united(paths: Sequence[Sequence[float]], spread: float) -> list[float]:
    """Chances [1 + L] that a union contains a path, from those of each drafter, [drafters][1 + L]."""
    found = []
    for chances in zip(*paths, strict=True):
        best = max(chances)
        learned = best + spread * (1.0 - math.prod(1.0 - chance for chance in chances) - best)
        found.append(min(learned, 1.0, sum(chances)))
    return found


class Gate:
    """End of speculation for good after requests that accepted too little (TensorRT-LLM's `acceptance_window`).

    Args:
        window: requests in the rolling average; 0 never closes the gate.
        threshold: least average of accepted draft tokens per drafted forward.
    """

    def __init__(self, window: int = 0, threshold: float = 0.0) -> None:
        self.window, self.threshold, self.closed = window, threshold, False
        self._lengths: deque[float] = deque(maxlen=window)

    @property
    def average(self) -> float:
        return sum(self._lengths) / len(self._lengths) if self._lengths else 0.0

    def record(self, accepted: int, forwards: int) -> bool:
        """Record a request with `accepted` draft tokens in `forwards` drafted forwards; return True if this closes the
        gate.
        """
        if self.closed or not self.window or not forwards:
            return False
        self._lengths.append(accepted / forwards)
        self.closed = len(self._lengths) == self.window and self.average < self.threshold
        return self.closed
