"""Warnings about drafts that do not help: each at most once, with figures and a remedy.

Only counts are kept here; the caller logs the warnings.
"""

from __future__ import annotations

from collections.abc import Collection

from sametoken.kinds import inside

FEW, MANY = 24, 200  # first guesses after which no hit, or hardly any, is significant
NEAR_ZERO = 0.02
WINDOW = 256  # forwards between two checks for drafts
MOSTLY = 0.8  # share of these forwards without a draft from which drafting counts as paused; probes continue
UNUSED = 32  # requests that ended without using a draft that was loaded
OF_DRAFTS = (
    "Such a draft belongs to another target, another chat template or another kind of head, has wrong layer ids, or "
    "was hardly trained; check what it was trained for, or leave it out"
)
OF_BLOCKS = "Its block was changed by a conversion or left out of a fine-tuning; use the original, or another method"


class Advice:
    """Collect counts about drafts and return the warnings that follow from them, each at most once."""

    def __init__(self) -> None:
        self._given: set[str] = set()
        self._first: dict[str, tuple[int, int]] = {}  # by method: first guesses tried and right
        self._ended = 0

    def _once(self, topic: str, text: str) -> list[str]:
        if topic in self._given:
            return []
        self._given.add(topic)
        return [text]

    def saw_draft(self, method: str, right: bool) -> list[str]:
        """Count a draft of a model; `right` is true if its first guess was accepted."""
        tried, hits = self._first.get(method, (0, 0))
        self._first[method] = tried, hits = tried + 1, hits + right
        hopeless = (tried == FEW and not hits) or (tried == MANY and hits < NEAR_ZERO * MANY)
        remedy = OF_BLOCKS if inside(method) else OF_DRAFTS
        text = f"{method}: {hits} of its first {tried} guesses were accepted. {remedy}"
        return self._once(f"zero {method}", text) if hopeless else []

    def saw_end(self, methods: Collection[str], models: Collection[str]) -> list[str]:
        """Count the end of a request that could use `methods`; `models` are the drafters with loaded weights."""
        self._ended = -UNUSED if set(methods) & set(models) else self._ended + 1
        if self._ended < UNUSED or not models:
            return []
        return self._once(
            "unused",
            f"a draft is loaded for {', '.join(sorted(models))}, but none of {self._ended} requests used it; leave it "
            "out to save its memory, or set method to that or to 'auto'",
        )


class Pauses:
    """Detect that drafting stops or resumes; only the 1st, 2nd, 4th, 8th .. change is reported.

    Attributes:
        paused: true while nearly all recent forwards had no draft because none was expected to pay.
    """

    def __init__(self) -> None:
        self.paused = False
        self._forwards = self._left_out = self._changes = 0

    def saw_forward(self, left_out: bool) -> bool:
        """Count a forward that could have had a draft; return True if a change is to be logged.

        Args:
            left_out: true if the forward had no draft because none was expected to pay.
        """
        self._forwards += 1
        self._left_out += left_out
        if self._forwards < WINDOW:
            return False
        stopped = self._left_out > MOSTLY * WINDOW
        changed, self.paused = stopped != self.paused, stopped
        self._forwards, self._left_out, self._changes = 0, 0, self._changes + changed
        return changed and not self._changes & (self._changes - 1)
