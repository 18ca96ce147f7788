"""How likely a guess is to come true, by its place on the path: counts that fade, at first blended with an average.

Pure arithmetic on counts. A request starts with what the whole engine has seen of its drafter, and the engine with a
guess that is hopeful enough to be tried.
"""

from __future__ import annotations

from collections import deque
from itertools import accumulate
from operator import mul

HOPE = 0.6  # chance of a guess before anything was seen: high enough to draft, low enough to be dropped soon
OFFER = 0.5  # chance that it has a guess at all, before it was asked: a drafter beside it may be needed from the start
ENGINE_MEMORY, REQUEST_MEMORY = 200.0, 48.0  # drafts after which a count has faded to 1/e
ENGINE_STRENGTH, REQUEST_STRENGTH = 2.0, 6.0  # tries that the wider average is worth


class Acceptance:
    """Chances by position, each given that all guesses before it came true.

    Args:
        wider: the average that stands in while little was seen; None for the engine's own, which starts with `HOPE`.
    """

    def __init__(self, wider: Acceptance | None = None) -> None:
        self._wider = wider
        self._fade = 1.0 - 1.0 / (ENGINE_MEMORY if wider is None else REQUEST_MEMORY)
        self._strength = ENGINE_STRENGTH if wider is None else REQUEST_STRENGTH
        self._offers = [0.0, 0.0]  # asked, offered
        self._tries: list[float] = []
        self._hits: list[float] = []

    def chance(self, position: int) -> float:
        """That the guess at `position` (from 0) comes true if those before it did."""
        return self.chances(position + 1)[-1]

    def chances(self, longest: int) -> list[float]:
        """The same of positions 0 to `longest` - 1."""
        wider = None if self._wider is None else self._wider.chances(longest)
        found, expected, strength = [], HOPE, self._strength
        for position in range(longest):
            if wider is not None:
                expected = wider[position]
            seen = position < len(self._tries)
            count, good = (self._tries[position], self._hits[position]) if seen else (0.0, 0.0)
            # What was never tried is thought to go on like the place before it.
            expected = (good + strength * expected) / (count + strength)
            found.append(expected)
        return found

    @property
    def offer(self) -> float:
        """That the drafter has a guess at all when asked."""
        expected = OFFER if self._wider is None else self._wider.offer
        return (self._offers[1] + self._strength * expected) / (self._offers[0] + self._strength)

    def gains(self, longest: int) -> list[float]:
        """Guesses expected to come true on a path of 1, 2, .. `longest` tokens, given that there is a draft."""
        return list(accumulate(accumulate(self.chances(longest), mul)))

    def asked(self, offered: bool) -> None:
        """The drafter was asked and did or did not have a guess."""
        self._offers = [self._offers[0] * self._fade + 1.0, self._offers[1] * self._fade + offered]

    def learn(self, accepted: int, longest: int) -> None:
        """A draft was verified.

        All places fade, tried or not, so that a place once given up is thought well of again, and tried, in time.

        Args:
            accepted: guesses that came true.
            longest: guesses that were asked for on a path; one that was not made did not come true.
        """
        self._tries = [count * self._fade for count in self._tries]
        self._hits = [count * self._fade for count in self._hits]
        for position in range(min(accepted + 1, longest)):
            if position == len(self._tries):
                self._tries.append(0.0)
                self._hits.append(0.0)
            self._tries[position] += 1.0
            self._hits[position] += position < accepted


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
