"""What drafts gained or lost against plain steps of about as many rows: measured, and the last word on drafting.

Pure arithmetic on costs, each in units of what a plain step is expected to take. No clock: times come in as numbers.
"""

from __future__ import annotations

from collections import deque
from statistics import median

SHARE = 0.01  # of the time, most that drafts may lose in the long run
CREDIT = 8.0  # plain steps that drafts of one row may lose at first; more rows tell as much in fewer steps
RETRY = 0.5  # plain steps to lose from which on drafts that paused are made again, and most that they owe
CLIP = 2.0  # times what a drafted step was expected to take: more than that is a stolen time slice
NEAR = 3  # plain steps that say what one takes now
RECALL_FIRST, RECALL_MOST = 8, 128  # drafted forwards before a plain one, to know what that takes


class Account:
    """The balance of drafts in batches of one size, in plain steps.

    Plain steps pay in, drafted ones pay what they took longer and earn the tokens that they emitted beyond one. With
    nothing left, and plain steps measured anew, drafts pause until there is something to lose again.

    Args:
        rows: of the batch.

    Attributes:
        paused: whether drafts measured slower than plain steps and wait.
        ratio: tokens per second of the drafts that were compared last, over those of plain steps; 1 before any.
    """

    def __init__(self, rows: int) -> None:
        self._most = CREDIT / rows**0.5
        self._balance = self._most
        self._plain: deque[float] = deque(maxlen=2 * NEAR - 1)
        self._emitted = self._spent = 0.0
        self._forwards, self._recall, self._checks = 0, RECALL_FIRST, 0
        self.paused, self.ratio = False, 1.0

    @property
    def pending(self) -> bool:
        """Whether the next step should be plain, to be compared with."""
        return not self.paused and (self._checks > 0 or self._forwards >= self._recall)

    def _now(self) -> float:
        """What a plain step costs; as expected until one was seen."""
        return median(self._plain) if self._plain else 1.0

    def _value(self) -> float:
        """Plain steps that the drafts since the last comparison saved."""
        return self._emitted - self._spent / self._now()

    def saw_draft(self, tokens: float, cost: float, expected: float) -> None:
        """A drafted step emitted `tokens` per row; it was `expected` to take so many plain steps."""
        cost = min(cost, CLIP * expected * self._now())
        self._emitted, self._spent, self._forwards = self._emitted + tokens, self._spent + cost, self._forwards + 1
        if self._balance + self._value() < 0.0:
            self._checks = NEAR

    def saw_plain(self, cost: float) -> None:
        """A step without a draft."""
        self._plain.append(cost)
        self._checks = max(0, self._checks - 1)
        self._balance = min(self._most, self._balance + SHARE)
        if self._forwards and not self._checks:
            self._settle()
        if self.paused and self._balance >= RETRY:
            self.paused = False

    def _settle(self) -> None:
        self._balance = max(-RETRY, min(self._most, self._balance + self._value()))
        self.ratio = self._emitted * self._now() / self._spent
        self.paused = self._balance < 0.0
        self._recall = RECALL_FIRST if self.paused else min(2 * self._recall, RECALL_MOST)
        self._emitted = self._spent = 0.0
        self._forwards = 0
