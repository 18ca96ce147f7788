"""Metrics of training since the last log entry, and its speed without evaluations and file writes."""

from __future__ import annotations

import time

from sametoken.learning.loss import AcceptanceMetrics


class Window:
    """Metrics since the last log entry, and the time of training alone."""

    def __init__(self) -> None:
        self._report: AcceptanceMetrics | None = None
        self._tokens = self._all = 0
        self._since = self._busy = 0.0
        self.rate = 0.0
        self.go_on()

    def go_on(self) -> None:
        """Restart the clock: the time since the last `add` does not count."""
        self._mark = time.perf_counter()

    def add(self, report: AcceptanceMetrics, tokens: int) -> None:
        passed = time.perf_counter() - self._mark
        self._since, self._busy = self._since + passed, self._busy + passed
        self._report = report if self._report is None else self._report + report
        self._tokens, self._all = self._tokens + tokens, self._all + tokens

    def take(self) -> AcceptanceMetrics:
        assert self._report is not None
        found, self.rate = self._report, self._tokens / max(self._since, 1e-9)
        self._report, self._tokens, self._since = None, 0, 0.0
        return found

    @property
    def overall(self) -> float:
        return self._all / max(self._busy, 1e-9)
