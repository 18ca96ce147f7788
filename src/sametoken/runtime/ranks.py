"""Tensor parallelism as the model sees it: which part of each matrix this process holds, and whom it sums with.

The processes are in `sametoken.parallel`; nothing here knows how they talk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from sametoken.runtime.cache import View


class RankPart(NamedTuple):
    """Part `rank` of `size` equal parts; the default is everything."""

    rank: int = 0
    size: int = 1

    def of(self, count: int) -> range:
        """Its share of `count` things, which `size` divides."""
        each = count // self.size
        return range(self.rank * each, (self.rank + 1) * each)


class Ranks(Protocol):
    """The processes that compute a decoder together, as one of them sees the others.

    Attributes:
        native_sum: what compiled code calls in place of `sum`: addresses of a function and of its first argument, see
            `Model` in forward.h. None where it calls `sum`.
    """

    @property
    def native_sum(self) -> tuple[int, int] | None: ...

    def begin(self, tokens: Tensor, view: View) -> None:
        """A forward of `tokens` [T] at the places of `view` begins in this process."""
        ...

    def sum(self, partial: Tensor) -> None:
        """Replaces float32 numbers by their sums over all ranks, added in the order of the ranks; never raises."""
        ...

    def end(self, last: Tensor) -> None:
        """The forward has computed `last` [T, H]. Raises EngineError if a rank is gone or computed something else."""
        ...

    def commit(self, rows: Tensor, starts: Tensor, path: Tensor) -> None:
        """The caches of all ranks move the nodes of `path`, see `KVCache.commit`."""
        ...


def divisors(sizes: Sequence[int], most: int = 64) -> list[int]:
    """The numbers of ranks up to `most` that divide all sizes."""
    return [count for count in range(1, most + 1) if not any(size % count for size in sizes)]
