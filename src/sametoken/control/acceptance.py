"""How likely a guess is to come true, by its place on the path: counts that fade, of each request and of all.

Pure arithmetic on counts. A request starts with what the engine has seen of its drafter, and the engine with a guess
that is hopeful enough to be tried. Legend: N requests, L longest path.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

HOPE = 0.6  # chance of a guess before anything was seen: high enough to draft, low enough to be dropped soon
PRIOR = 8.0  # observations that what was expected before any is worth
MEMORY = 100.0  # steps that drafted, after which a count of all requests has faded to 1/e
RECENT = 30.0  # steps after which a count of one request has, drafted or not: what its text is like changes
_FADE = 1.0 - 1.0 / MEMORY


class Acceptance:
    """The guesses of one drafter. Chances are by place, each given that all guesses before it came true.

    Place 0 is whether there is a draft at all.

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
        """The chance that a sibling is right where the guess of the chain is wrong."""
        return self._beside[1] / (self._beside[0] + PRIOR)

    @property
    def siblings(self) -> float:
        """Siblings that are verified per guess of a chain."""
        return self._beside[3] / (self._beside[2] + PRIOR)

    @property
    def kept(self) -> list[float]:
        """[1 + L] how often a guess that may be made is there to be verified."""
        return [(made + PRIOR) / (asked + PRIOR) for asked, made in zip(self._asked, self._made, strict=True)]

    def __len__(self) -> int:
        """Requests that are counted."""
        return len(self._requests)

    def forget(self, request: int) -> None:
        """The request ended."""
        self._requests.pop(request, None)

    def _of(self, request: int, now: int) -> Sequence[float]:
        """The counts of a request as of this step."""
        when, counts = self._requests.get(request, (now, (0.0,) * 4))
        fade = (1.0 - 1.0 / RECENT) ** (now - when)
        return [fade * count for count in counts]

    def chances(self, request: int, now: int) -> list[float]:
        """[1 + L] the same of a request in step `now`."""
        asked, made, tried, right = self._of(request, now)
        there = (made + PRIOR * self.engine[0]) / (asked + PRIOR)
        # Far places are reached by good guesses only; a row whose first ones fail is no better at its later ones.
        return [there, *((right + PRIOR * chance) / (tried + PRIOR) for chance in self.engine[1:])]

    def learn(
        self, now: int, requests: Sequence[int], asked: Sequence[int], longest: Sequence[int],
        accepted: Sequence[int], siblings: Sequence[int] = (0,), saved: Sequence[bool] = (False,),
    ) -> None:  # fmt: skip
        """Drafts were verified, one of each of N different requests.

        All places fade, tried or not, so that a place once given up is thought well of again, and tried, in time.

        Args:
            now: the step.
            asked: tokens on a path that were asked for; a guess that was not made did not come true.
            longest: tokens on the longest path of each draft, 0 if the drafter had none.
            accepted: guesses that came true, siblings aside.
            siblings: of each draft; `saved`: whether one of them was right after those.
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
            # What was never tried is thought to go on like the place before it.
            expected = (hits + PRIOR * expected) / (tries + PRIOR)
            found.append(expected)
            expected = HOPE if place == 0 else expected
        return found


class Overlap:
    """Whether several drafters come true at the same places.

    Args:
        drafters: how many.
        longest: L.
    """

    def __init__(self, drafters: int, longest: int) -> None:
        self._drafts = 0.0
        self._held = [[0.0] * longest for _ in range(drafters + 1)]  # drafts that held a path; in the end all united

    def learn(self, accepted: Sequence[int]) -> None:
        """Guesses of all of them about one place were verified; `accepted` of each came true."""
        self._drafts = _FADE * self._drafts + 1.0
        for held, count in zip(self._held, [*accepted, max(accepted)], strict=True):
            held[:] = [_FADE * value + (place < count) for place, value in enumerate(held)]

    @property
    def spread(self) -> float:
        """What a union holds beyond the best drafter, over what it would if they were right independently: 0 where
        all are right at the same places, more than 1 where one is right where others are wrong.
        """
        more = expected = 0.0
        for *each, union in zip(*self._held, strict=True):
            most = max(1.0, self._drafts)
            more += union - max(each)
            expected += most * (1.0 - math.prod(1.0 - held / most for held in each)) - max(each)
        return (more + 1.0) / (expected + 1.0)


def united(paths: Sequence[Sequence[float]], spread: float) -> list[float]:
    """[1 + L] the chances that a union holds a path, from those of each drafter, [drafters][1 + L]."""
    found = []
    for chances in zip(*paths, strict=True):
        best = max(chances)
        learned = best + spread * (1.0 - math.prod(1.0 - chance for chance in chances) - best)
        found.append(min(learned, 1.0, sum(chances)))
    return found


class Gate:
    """Ends speculation for good when finished requests accepted too little (TensorRT-LLM's `acceptance_window`).

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
        """A request ended with `accepted` draft tokens in `forwards` drafted forwards; whether this closes the gate."""
        if self.closed or not self.window or not forwards:
            return False
        self._lengths.append(accepted / forwards)
        self.closed = len(self._lengths) == self.window and self.average < self.threshold
        return self.closed
