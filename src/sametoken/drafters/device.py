"""Guessing on the device inside a captured step: chains of a fixed number of levels, no value ever seen by the host.

Legend: B lanes, K levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from sametoken.runtime.lanes import Lanes
from sametoken.speculation.sampling import Sampling


class Proposer(Protocol):
    """The part of a drafter that a captured step contains.

    Attributes:
        depth: K, tokens of every guess.
    """

    depth: int

    def enter(self, row: int) -> None:
        """The row will be guessed for on the device until further notice."""

    def guess(self, lanes: Lanes, sampling: Sampling, keys: int) -> Tensor:
        """[B, K] int64 tokens that may follow the pending ones; kernels only, the same ones at every call.

        Args:
            keys: bound of what lies in any row, this step's nodes included.
        """
        ...

    def told(self, row: int, tokens: Sequence[int], committed: int) -> None:
        """The row's tokens and how many of them are committed, as the host has learned of them."""


class Plain:
    """No guesses: plain decoding."""

    depth = 0

    def enter(self, row: int) -> None:
        pass

    def guess(self, lanes: Lanes, sampling: Sampling, keys: int) -> Tensor:
        return lanes.last[:, 2:]

    def told(self, row: int, tokens: Sequence[int], committed: int) -> None:
        pass
