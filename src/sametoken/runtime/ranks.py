"""Interface of tensor parallelism for models: the part of each matrix in this process, and the collectives.

`sametoken.parallel` has the processes and their communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from sametoken.runtime.cache import PageTable, View
from sametoken.speculation.rows import Sampling

TILE = 16  # outputs of a tile of a packed weight


class RankPart(NamedTuple):
    """Part `rank` of `size` equal parts; the default is the whole.

    Attributes:
        whole_head: true if the part includes the whole output head, which a draft may share.
    """

    rank: int = 0
    size: int = 1
    whole_head: bool = False

    def of(self, count: int) -> range:
        """Range of this part of `count` elements, which `size` divides."""
        each = count // self.size
        return range(self.rank * each, (self.rank + 1) * each)


class Columns(NamedTuple):
    """Partition of the logits over the ranks.

    Attributes:
        begins: [ranks + 1] first logit of each rank, and the number of logits.
        rank: number of this rank.
        whole_head: see `RankPart`.
    """

    begins: tuple[int, ...]
    rank: int
    whole_head: bool

    @property
    def own(self) -> range:
        """Range of this rank's logits."""
        return range(self.begins[self.rank], self.begins[self.rank + 1])

    @staticmethod
    def of(part: RankPart, count: int) -> Columns:
        """Partition of `count` logits into nearly equal parts of whole tiles."""
        tiles = -(-count // TILE)
        begins = (min(count, TILE * (tiles * rank // part.size)) for rank in range(part.size + 1))
        return Columns(tuple(begins), part.rank, part.whole_head)


class NativeExchange(NamedTuple):
    """Addresses of the collectives that compiled code calls, and of their common first argument.

    Attributes:
        sum, ranks: fields of `Model` in forward.h.
        gather: field of `Output` in decoder.cpp.
    """

    sum: int | None
    gather: int | None
    ranks: int | None


class Ranks(Protocol):
    """Collectives of the processes that compute a decoder together, in one of them.

    Attributes:
        native: functions for compiled code in place of `sum` and `share`; None if it calls these methods.
    """

    @property
    def native(self) -> NativeExchange | None: ...

    def begin(self, tokens: Tensor, view: View) -> None:
        """Begin a forward of `tokens` [T] at the places of `view`, on rank 0 by sending it to the others."""
        ...

    def begin_chains(
        self, table: PageTable, rows: Sequence[int], starts: Sequence[int], tokens: Sequence[Sequence[int]],
        skipped: Sequence[int], levels: int, sampling: Sampling,
    ) -> None:  # fmt: skip
        """Begin drafting of chains, see `Decoder.guess`; `end` follows with the result."""
        ...

    def sum(self, partial: Tensor) -> None:
        """All-reduce: replace float32 numbers by their sums over all ranks, in the order of the ranks; never raises."""
        ...

    def end(self, last: Tensor) -> None:
        """Compare the result of all ranks: `last` [T, H] of a forward, or draft chains [B, N].

        Raises:
            EngineError: a rank is lost or computed something else.
        """
        ...

    def score(self, last: Tensor) -> None:
        """Begin the computation of logits of hidden states `last` [R, H] on all ranks; `gather` follows."""
        ...

    def gather(self, own: Tensor, begins: Sequence[int]) -> Tensor:
        """Gather the logits of all ranks: [R, V] on rank 0, undefined elsewhere.

        Args:
            own: [R, begins[rank + 1] - begins[rank]] float32, contiguous.
            begins: see `Columns`.

        Raises:
            EngineError: a rank is lost.
        """
        ...

    def share(self, own: Tensor, begins: Sequence[int]) -> Tensor:
        """All-gather within a forward: result of `gather` on all ranks; never raises."""
        ...

    def commit(self, rows: Tensor, starts: Tensor, path: Tensor) -> None:
        """Move the nodes of `path` in the caches of all ranks, see `KVCache.commit`."""
        ...


def divisors(sizes: Sequence[int], most: int = 64) -> list[int]:
    """Possible numbers of ranks, up to `most`: common divisors of all sizes."""
    return [count for count in range(1, most + 1) if not any(size % count for size in sizes)]
