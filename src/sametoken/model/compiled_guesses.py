"""Inputs, bounds, prices and results of drafting with the compiled kernels.

Plain values, and the structure of prices that kernels/cpu/stop.h reads. Legend: B rows, N nodes of a draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, c_float, c_int32
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

from sametoken.control.worth import EndedChains, Worth
from sametoken.kernels.cpu.structures import CWorth, struct_of


class Committed(NamedTuple):
    """Committed tokens that rows of a cache read before they draft.

    Attributes:
        rows: rows of the page table.
        starts: lengths of the rows, which are the indexes of the tokens.
        tokens: one or more tokens of each row; guesses follow the last one.
        features: [tokens of all rows, W] features of the tokens for a head, row after row; None for a decoder.
        skipped: tokens of each row's text that the rows of the cache lack; () for none.
    """

    rows: Sequence[int]
    starts: Sequence[int]
    tokens: Sequence[Sequence[int]]
    features: Tensor | None = None
    skipped: Sequence[int] = ()

    def drawn_at(self, ahead: int) -> list[int]:
        """Positions in the rows' texts of the first guesses, `ahead` past their indexes in complete rows."""
        skipped = self.skipped or [0] * len(self.rows)
        return [s + len(n) + more + ahead for s, n, more in zip(self.starts, self.tokens, skipped, strict=True)]

    def padded(self, width: int) -> Tensor | None:
        """Features [B * width, W], each row's last one repeated."""
        lengths = list(map(len, self.tokens))
        if self.features is None or min(lengths) == width:
            return self.features
        begins = accumulate(lengths, initial=0)
        at = [begin + min(i, length - 1) for begin, length in zip(begins, lengths, strict=False) for i in range(width)]
        return self.features[torch.tensor(at)]


class TreeBounds(NamedTuple):
    """Bounds of draft trees.

    Attributes:
        branches: number of children of a node, and of expanded nodes of a level.
        limits: [B] longest path of each row.
        budgets: [B] number of guesses of each row.
    """

    branches: int
    limits: Sequence[int]
    budgets: Sequence[int]


class Guesses(NamedTuple):
    """Draft chains of B rows, with their siblings.

    Attributes:
        tokens: [B, N] int64 last committed token and draft of each row, with padding.
        shares: [B, levels, K] float32 in 0 .. 1, share of each candidate in a draw: its p / E over the sum of all
            tokens' p / E, with the noise E (1 for greedy rows). Without worth, the guess is the only candidate.
        ended: candidates made and kept, if rows ended one by one.
        tree: [B, N] each: parents, as in a `Draft`, and slot of a node's KV past the row's length, -1 for none.
    """

    tokens: Tensor
    shares: Tensor
    ended: EndedChains | None = None
    tree: tuple[Tensor, Tensor] | None = None


class PricedGuesses:
    """Structure of guesses' values and costs for the kernels, with their results."""

    def __init__(self, worth: Worth, limits: Sequence[int]) -> None:
        rows, ranks, levels = len(limits), len(worth.chances), max(limits)
        siblings = worth.siblings or [0] * rows
        most = max(map(sum, zip(limits, siblings, strict=True)))
        chances = [*chain.from_iterable(chain.from_iterable(worth.chances))]
        self._chances, self._weights = (c_float * len(chances))(*chances), (c_float * rows)(*worth.weights)
        self._typical = (c_float * (2 * ranks))(*chain.from_iterable(worth.typical))
        self._rows = [(c_int32 * rows)(*each) for each in (worth.sampled, limits, siblings)]
        self._made, self._kept = torch.empty(rows, dtype=torch.int32), torch.empty(rows, levels, dtype=torch.int32)
        self._candidates = torch.empty(rows, levels, ranks, dtype=torch.int64)
        self._tree = torch.empty(2, rows, 1 + most, dtype=torch.int64)
        parents, written = self._tree
        sampled, longest, beside = map(addressof, self._rows)
        self.struct: CWorth = struct_of(
            CWorth, chances=addressof(self._chances), typical=addressof(self._typical), sampled=sampled,
            limits=longest, siblings=beside, weights=addressof(self._weights), **worth.time._asdict(),
            bins=len(chances) // (2 * ranks), ranks=ranks, most=most, candidates=self._candidates, parents=parents,
            written=written, made=self._made, kept=self._kept,
        )  # fmt: skip

    @property
    def ended(self) -> EndedChains:
        return EndedChains(self._made.tolist(), self._kept.tolist(), self._candidates.tolist())

    @property
    def tree(self) -> tuple[Tensor, Tensor]:
        """Parents and places [B, 1 + most] each, see `Guesses`."""
        parents, written = self._tree
        return parents, written
