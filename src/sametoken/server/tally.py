"""Data of the metrics: sums over requests, the engine's load, and histograms with cheap additions."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from sametoken.engine.engine import EngineLoad
from sametoken.engine.stats import SpeculationStats


class Totals(NamedTuple):
    """Sums over all requests so far: tokens and statistics of speculation.

    Attributes:
        speculation: statistics of all forwards.
        prompt_tokens: number of prompt tokens.
        cached_tokens: number of prompt tokens that were in the prefix cache.
        generated: number of generated tokens.
    """

    speculation: SpeculationStats
    prompt_tokens: int
    cached_tokens: int
    generated: int


class Snapshot(NamedTuple):
    """Values read at one Prometheus scrape."""

    totals: Totals
    load: EngineLoad


class Tally:
    """Histogram with cheap additions; not thread-safe.

    Args:
        bounds: upper ends of the buckets, ascending and inclusive.
        counts: observations per bucket, and at the end those above all bounds; None means no observations.
        total: sum of all observations.
    """

    def __init__(self, bounds: Sequence[float], counts: Sequence[int] | None = None, total: float = 0.0) -> None:
        self._bounds, self.total = tuple(bounds), total
        self._counts = [0] * (len(self._bounds) + 1) if counts is None else list(counts)

    def add(self, value: float, times: int = 1) -> None:
        """Add `times` observations of a value."""
        self._counts[bisect_left(self._bounds, value)] += times
        self.total += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Prometheus' buckets: upper end, and number of observations up to it."""
        labels = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        return list(zip(labels, map(float, accumulate(self._counts)), strict=True))
