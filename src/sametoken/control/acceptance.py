"""Estimated probability that a draft token is accepted, by its place on the path.

The estimates come from counts that decay exponentially, per request and over all requests. A request without counts
has the estimate of its drafter over all requests. A drafter without counts has a prior, to which the estimates of an
unused drafter return, so that it is tried again. Pure arithmetic. Legend: L length of the longest path in tokens.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

HOPE = 0.6  # prior chance of a guess: high enough that drafting starts, low enough that a bad drafter soon stops
BEST = 0.9  # prior chance of a guess that needs no reading: it is soon found out
PRIOR = 8.0  # weight of the prior, in observations
MEMORY = 100.0  # steps with drafts after which a count over all requests has decayed to 1/e
UNUSED = 2000.0  # steps without drafts after which such a count has decayed to 1/e
RECENT = 30.0  # steps, with drafts or without, after which a count of one request has decayed to 1/e: its text changes


class Acceptance:
    """Acceptance estimates of one drafter, or of several whose guesses are united.

    The chance at place k >= 1 is the probability that the k-th guess of a path is accepted if all guesses before it
    were. The chance at place 0 is the probability that a draft is returned.

    Args:
        longest: L.
    """

    def __init__(self, longest: int) -> None:
        # Over all requests, by place: guesses verified, accepted, requested, and returned by the drafter.
        self._tried, self._right, self._asked, self._made = ([0.0] * (longest + 1) for _ in range(4))
        self._when = 0  # step of the last update
        # By request: step of the last update; drafts requested, drafts returned, guesses verified, guesses accepted.
        self._requests: dict[int, tuple[int, Sequence[float]]] = {}

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

    def overall(self, now: int, prior: Sequence[float] = (HOPE, HOPE)) -> list[float]:
        """Estimated chances over all requests in step `now`, [1 + L].

        Args:
            now: number of the step.
            prior: chances at the first places without observations. The prior of a later place is the chance of the
                place before it.
        """
        fade = math.exp((self._when - now) / UNUSED)
        found = list[float]()
        for place, (tries, hits) in enumerate(zip(self._tried, self._right, strict=True)):
            expected = prior[place] if place < len(prior) else found[-1]
            found.append((fade * hits + PRIOR * expected) / (fade * tries + PRIOR))
        return found

    def chances(self, request: int, now: int, prior: Sequence[float] = (HOPE, HOPE)) -> list[float]:
        """Estimated chances of a request in step `now`, [1 + L]; `prior` as in `overall`."""
        asked, made, tried, right = self._of(request, now)
        there, *overall = self.overall(now, prior)
        # The counts of a request are pooled over places: a late place is reached after accepted guesses only, so a
        # request whose first guesses fail has no observations of its own there.
        return [
            (made + PRIOR * there) / (asked + PRIOR),
            *((right + PRIOR * chance) / (tried + PRIOR) for chance in overall),
        ]

    def learn(
        self, now: int, requests: Sequence[int], asked: Sequence[int], longest: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """Count the verified drafts of one step, one per request.

        The counts of all places decay, also those of places without new observations: the chance of a place that is no
        longer drafted returns to the prior, and the place is tried again.

        Args:
            now: number of the step.
            requests: identifiers of the requests, all different.
            asked: requested tokens on a path; a guess that the drafter did not return counts as rejected.
            longest: tokens on the longest path of each draft; 0 if the drafter returned no draft.
            accepted: accepted guesses of each draft.
        """
        # Once a step: the rows of one batch are correlated.
        fade = (1.0 - 1.0 / MEMORY) * math.exp((self._when - now) / UNUSED)
        for values in (self._tried, self._right, self._asked, self._made):
            values[:] = [fade * value for value in values]
        self._when = now
        for request, most, made, right in zip(requests, asked, longest, accepted, strict=True):
            tried = min(right + 1, most) if made else 0
            seen = 1, made > 0, tried, right if made else 0
            self._requests[request] = now, [a + b for a, b in zip(self._of(request, now), seen, strict=True)]
            lasts = tried, right if made else -1, most, made if made else -1
            for values, last in zip((self._tried, self._right, self._asked, self._made), lasts, strict=True):
                for place in range(last + 1):
                    values[place] += 1.0


def united(parts: Sequence[Sequence[float]]) -> list[float]:
    """Chances of the union of independent drafts, [1 + L], from the chances of each draft, [drafts][1 + L]."""
    missed = [1.0] * len(parts[0])
    for chances in parts:
        path = 1.0
        for place, chance in enumerate(chances):
            path *= chance
            missed[place] *= 1.0 - path
    held = [1.0 - each for each in missed]
    return [held[0], *(b / max(a, 1e-9) for a, b in pairwise(held))]


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
