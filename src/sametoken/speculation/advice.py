"""What an operator should hear about drafts that do not help: each thing once, with figures and what to do.

Counts only; whoever owns the engine says it aloud.
"""

from __future__ import annotations

from collections.abc import Collection

FEW, MANY = 24, 200  # first guesses after which none, or hardly any, being right is no accident
NEAR_ZERO = 0.02
LONG_OFF = 1000  # forwards in a row that could have drafted and did not
UNUSED = 32  # requests that ended without using a draft that was loaded


class Advice:
    """Collects what was seen and returns the warnings that follow from it, each at most once."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._first: dict[str, tuple[int, int]] = {}  # by method: first guesses tried and right
        self._off = 0
        self._ended = 0

    def _once(self, topic: str, text: str) -> list[str]:
        if topic in self._said:
            return []
        self._said.add(topic)
        return [text]

    def saw_draft(self, method: str, right: bool) -> list[str]:
        """The first guess of a draft that a model made was right or wrong."""
        tried, hits = self._first.get(method, (0, 0))
        self._first[method] = tried, hits = tried + 1, hits + right
        hopeless = (tried == FEW and not hits) or (tried == MANY and hits < NEAR_ZERO * MANY)
        if not hopeless:
            return []
        return self._once(
            f"zero {method}",
            f"{method}: {hits} of its first {tried} guesses came true. Such a draft belongs to another target, another "
            "chat template or another kind of head (or its layer ids are wrong); check what it was trained for, or "
            "leave it out",
        )

    def saw_forward(self, off: bool, method: str, chance: float, needed: float, rows: int) -> list[str]:
        """A forward that might have drafted did (`off` false) or did not, for want of gain.

        Args:
            method: whose first guess has this `chance`; one guess a row pays from `needed` on with so many `rows`.
        """
        self._off = self._off + 1 if off else 0
        if self._off < LONG_OFF:
            return []
        return self._once(
            "off",
            f"nothing was drafted in {self._off} forwards: about {chance:.0%} of {method}'s first guesses come true, "
            f"and with {rows} rows a draft pays from about {needed:.0%}. It is tried again now and then; a better or "
            "cheaper draft, or smaller batches, would help, and method 'none' saves its memory",
        )

    def saw_end(self, methods: Collection[str], models: Collection[str]) -> list[str]:
        """A request ended that might use `methods`; `models` are the drafters for which weights were loaded."""
        self._ended = -UNUSED if set(methods) & set(models) else self._ended + 1
        if self._ended < UNUSED or not models:
            return []
        return self._once(
            "unused",
            f"a draft is loaded for {', '.join(sorted(models))}, but none of {self._ended} requests used it; leave it "
            "out to save its memory, or set method to that or to 'auto'",
        )
