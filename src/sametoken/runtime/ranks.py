"""Tensor parallelism as the model sees it: which part of each matrix this process holds, and whom it sums with.

The processes are in `sametoken.parallel`; nothing here knows how they talk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from sametoken.runtime.cache import PageTable, View
from sametoken.speculation.rows import Sampling

TILE = 16  # outputs of a packed weight that lie together


class RankPart(NamedTuple):
    """Part `rank` of `size` equal parts; the default is everything.

    Attributes:
        whole_head: whether it has the whole output head, since a draft reads that too.
    """

    rank: int = 0
    size: int = 1
    whole_head: bool = False

    def of(self, count: int) -> range:
        """Its share of `count` things, which `size` divides."""
        each = count // self.size
        return range(self.rank * each, (self.rank + 1) * each)


class Columns(NamedTuple):
    """Logits that each rank computes.

    Attributes:
        begins: [ranks + 1] the first one of each rank, and how many there are.
        rank: the rank that this is.
        whole_head: see `RankPart`.
    """

    begins: tuple[int, ...]
    rank: int
    whole_head: bool

    @property
    def own(self) -> range:
        """Logits of this rank."""
        return range(self.begins[self.rank], self.begins[self.rank + 1])

    @staticmethod
    def of(part: RankPart, count: int) -> Columns:
        """Divide `count` logits into nearly equal parts of whole tiles."""
        tiles = -(-count // TILE)
        begins = (min(count, TILE * (tiles * rank // part.size)) for rank in range(part.size + 1))
        return Columns(tuple(begins), part.rank, part.whole_head)


class NativeExchange(NamedTuple):
    """Functions that compiled code calls: their addresses, and that of the first argument of both.

    Attributes:
        sum, ranks: see `Model` in forward.h.
        gather: see `Output` in decoder.cpp.
    """

    sum: int | None
    gather: int | None
    ranks: int | None


class Ranks(Protocol):
    """The processes that compute a decoder together, as one of them sees the others.

    Attributes:
        native: what compiled code calls in place of `sum` and `share`; None where it calls these.
    """

    @property
    def native(self) -> NativeExchange | None: ...

    def begin(self, tokens: Tensor, view: View) -> None:
        """A forward of `tokens` [T] at the places of `view` begins in this process."""
        ...

    def begin_chains(
        self, table: PageTable, rows: Sequence[int], starts: Sequence[int], tokens: Sequence[Sequence[int]],
        levels: int, sampling: Sampling,
    ) -> None:  # fmt: skip
        """Chains of guesses begin in this process, see `Decoder.guess`; `end` follows with what was guessed."""
        ...

    def sum(self, partial: Tensor) -> None:
        """Replace float32 numbers by their sums over all ranks, added in the order of the ranks; never raises."""
        ...

    def end(self, last: Tensor) -> None:
        """A forward has computed `last` [T, H], or chains are guessed [B, N], on all ranks.

        Raises:
            EngineError: a rank is gone or computed something else.
        """
        ...

    def score(self, last: Tensor) -> None:
        """Logits of the hidden states `last` [R, H] are computed in all ranks, each its own; `gather` follows."""
        ...

    def gather(self, own: Tensor, begins: Sequence[int]) -> Tensor:
        """[R, V] the logits of all ranks, on rank 0; elsewhere anything.

        Args:
            own: [R, begins[rank + 1] - begins[rank]] float32, contiguous.
            begins: see `Columns`.

        Raises:
            EngineError: a rank is gone.
        """
        ...

    def share(self, own: Tensor, begins: Sequence[int]) -> Tensor:
        """Gather as `gather` does, on all ranks, within a forward; never raises."""
        ...

    def commit(self, rows: Tensor, starts: Tensor, path: Tensor) -> None:
        """Move the nodes of `path` in the caches of all ranks, see `KVCache.commit`."""
        ...


def divisors(sizes: Sequence[int], most: int = 64) -> list[int]:
    """Numbers of ranks up to `most` that divide all sizes."""
    return [count for count in range(1, most + 1) if not any(size % count for size in sizes)]
