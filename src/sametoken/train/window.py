"""Progress of training since the last line of its log, and its speed without the time of evaluations and files."""

from __future__ import annotations

import time

from sametoken.learning.loss import AcceptanceMetrics


class Window:
    """Figures since the last line of the log, and the time of training alone."""

    def __init__(self) -> None:
        self._report: AcceptanceMetrics | None = None
        self._tokens = self._all = 0
        self._since = self._busy = 0.0
        self.rate = 0.0
        self.go_on()

    def go_on(self) -> None:
        """Training goes on; what was done since the last `add` is not part of it."""
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
