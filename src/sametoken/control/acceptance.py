"""How likely a guess is to come true, by its place on the path: counts that fade, of each request and of all.

Pure arithmetic on counts. A request starts with what the engine has seen of its drafter, and the engine with a guess
that is hopeful enough to be tried. Legend: N requests, L longest path.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

HOPE = 0.6  # chance of a guess before anything was seen: high enough to draft, low enough to be dropped soon
MEMORY = 100.0  # drafts of a request, or steps of all, after which a count has faded to 1/e
ENGINE_STRENGTH, REQUEST_STRENGTH = 2.0, 12.0  # tries that what is expected before any is worth


class Acceptance:
    """The guesses of one drafter. Chances are by position, each given that all guesses before it came true.

    Args:
        longest: L.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        # By slot, of which 0 is the engine's, see `_counted`. Place 0 is whether there was a draft at all.
        self._counts = np.zeros((8, 4, longest + 1))
        self._slots: dict[int, int] = {}
        self._free = [*range(7, 0, -1)]
        self._engine: Floats | None = None
        # Of drafts whose chain was wrong: how many, and those with a sibling that was right. Guesses, and siblings.
        self._beside = np.zeros(4)

    @property
    def saved(self) -> float:
        """The chance that a sibling is right where the guess of the chain is wrong."""
        return float(self._beside[1] / (self._beside[0] + ENGINE_STRENGTH))

    @property
    def siblings(self) -> float:
        """Siblings that are verified per guess of a chain."""
        return float(self._beside[3] / (self._beside[2] + ENGINE_STRENGTH))

    @property
    def kept(self) -> Floats:
        """[1 + L] how often a guess that may be made is there to be verified; place 0 is that there is a draft."""
        _, _, asked, made = self._counts[0]
        found: Floats = (made + ENGINE_STRENGTH) / (asked + ENGINE_STRENGTH)
        return found

    def __len__(self) -> int:
        """Requests that are counted."""
        return len(self._slots)

    def _slot(self, request: int) -> int:
        if request not in self._slots:
            if not self._free:
                size = len(self._counts)
                self._counts = np.concatenate([self._counts, 0.0 * self._counts])
                self._free = [*range(2 * size - 1, size - 1, -1)]
            self._slots[request] = self._free.pop()
        return self._slots[request]

    def forget(self, request: int) -> None:
        """The request ended."""
        if request in self._slots:
            slot = self._slots.pop(request)
            self._counts[slot] = 0.0
            self._free.append(slot)

    @property
    def engine(self) -> Floats:
        """[1 + L] that the drafter has a guess at all when asked, and the chance of each guess, over all requests."""
        if self._engine is None:
            found, expected = [], HOPE
            for place, (tries, hits) in enumerate(zip(*self._counts[0, :2].tolist(), strict=True)):
                # What was never tried is thought to go on like the place before it.
                expected = (hits + ENGINE_STRENGTH * expected) / (tries + ENGINE_STRENGTH)
                found.append(expected)
                expected = HOPE if place == 0 else expected
            self._engine = np.array(found)
        return self._engine

    def chances(self, requests: Sequence[int]) -> Floats:
        """[N, 1 + L] the same of each request."""
        slots = [self._slots.get(request, 0) for request in requests]
        tries, hits = self._counts[slots, 0], self._counts[slots, 1]
        expected = np.tile(self.engine, (len(slots), 1))
        # Far places are reached by good guesses only; a row whose first ones fail is no better at its later ones.
        level, known = hits[:, 1:].sum(1, keepdims=True), tries[:, 1:].sum(1, keepdims=True)
        expected[:, 1:] = (level + REQUEST_STRENGTH * expected[:, 1:]) / (known + REQUEST_STRENGTH)
        found: Floats = (hits + REQUEST_STRENGTH * expected) / (tries + REQUEST_STRENGTH)
        if 0 in slots:
            found[[slot == 0 for slot in slots]] = self.engine
        return found

    def learn(
        self, requests: Sequence[int], asked: Sequence[int], longest: Sequence[int], accepted: Sequence[int],
        siblings: Sequence[int] = (0,), saved: Sequence[bool] = (False,),
    ) -> None:  # fmt: skip
        """Drafts were verified, one of each of N different requests.

        All places fade, tried or not, so that a place once given up is thought well of again, and tried, in time.

        Args:
            asked: tokens on a path that were asked for; a guess that was not made did not come true.
            longest: tokens on the longest path of each draft, 0 if the drafter had none.
            accepted: guesses that came true, siblings aside.
            siblings: of each draft; `saved`: whether one of them was right after those.
        """
        slots = [self._slot(request) for request in requests]
        counted = np.stack([_counted(self._longest, *each) for each in zip(asked, longest, accepted, strict=True)])
        fade = 1.0 - 1.0 / MEMORY
        self._counts[slots] = fade * self._counts[slots] + counted
        self._counts[0] = fade * self._counts[0] + counted.sum(0)  # steps: one batch tells little of the next requests
        wrong = sum(right < made for made, right in zip(longest, accepted, strict=True))
        self._beside *= fade
        self._beside += wrong, sum(saved), sum(longest), sum(siblings)
        self._engine = None


@lru_cache(maxsize=4096)
def _counted(longest: int, asked: int, made: int, accepted: int) -> Floats:
    """[4, 1 + longest] what one draft counts: guesses that were tried, that came true, that were asked for and made."""
    places = np.arange(longest + 1)
    tried = (places <= min(accepted + 1, asked)) if made else places == 0
    right = (places <= accepted) & tried & (made > 0)
    return np.array([tried, right, places <= asked, (places <= made) & (made > 0)], dtype=float)


class Overlap:
    """Whether several drafters come true at the same places.

    Args:
        drafters: how many.
        longest: L.
    """

    def __init__(self, drafters: int, longest: int) -> None:
        self._drafts = 0.0
        self._held = np.zeros((drafters + 1, 1 + longest))  # drafts that held the target's path; in the end all united
        self._spread: float | None = None

    def learn(self, accepted: Sequence[int]) -> None:
        """Guesses of all of them about one place were verified; `accepted` of each came true."""
        fade = 1.0 - 1.0 / MEMORY
        self._drafts, self._spread = fade * self._drafts + 1.0, None
        self._held *= fade
        for held, count in zip(self._held, [*accepted, max(accepted)], strict=True):
            held[1 : count + 1] += 1.0

    @property
    def spread(self) -> float:
        """What a union holds beyond the best drafter, over what it would if they were right independently: 0 where
        all are right at the same places, more than 1 where one is right where others are wrong.
        """
        if self._spread is None:
            chances = self._held / max(1.0, self._drafts)
            best, independent = chances[:-1].max(axis=0), 1.0 - np.prod(1.0 - chances[:-1], axis=0)
            more, expected = (float(self._drafts * (each - best).sum()) for each in (chances[-1], independent))
            self._spread = (more + ENGINE_STRENGTH) / (expected + ENGINE_STRENGTH)
        return self._spread


def united(chances: Floats, spread: float) -> Floats:
    """[.., 1 + L] the chances that a union holds a path, from those of each drafter, [drafters, .., 1 + L]."""
    best = chances.max(axis=0)
    learned = best + spread * (1.0 - np.prod(1.0 - chances, axis=0) - best)
    found: Floats = np.minimum(learned, np.minimum(1.0, chances.sum(axis=0)))
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
