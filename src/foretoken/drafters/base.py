"""The protocol of whoever guesses. A drafter learns what became certain and proposes what may come next.

It can only cost time, never a token: the target's draws do not depend on it (`speculation.verify`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from foretoken.speculation.draft import Draft
from foretoken.speculation.sampling import Sampling


class Drafter(Protocol):
    """Makes drafts for the rows of one engine.

    Attributes:
        taps: target layers (output of block i, 0-based) whose hidden states it wants; () for none.
        namespace: names what it keeps in the shared cache pages, "" for nothing. Prefix pages are reused only within
            a namespace, because a page that another method filled lacks this drafter's half.
        lag: most observed tokens that its half of the pages may still lack.
        nodes: most draft tokens of one proposal, which sizes the lookahead of the cache.
    """

    taps: tuple[int, ...]
    namespace: str
    lag: int
    nodes: int

    def admit(self, row: int, cached: Sequence[int]) -> None:
        """A sequence starts in `row`; the tokens `cached` lie in reused prefix pages and are not observed again."""

    def observe(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], features: Tensor | None) -> None:
        """Told what became certain, in order: a prompt chunk, or the accepted path from the pending token on.

        Args:
            rows: distinct rows.
            tokens: one sequence of token ids per row, continuing what was admitted and observed before.
            features: [sum of lengths, len(taps) * H] hidden states of these tokens, or None without taps.
        """

    def propose(self, rows: Sequence[int], pending: Sequence[int], limits: Sequence[int], sampling: Sampling) -> Draft:
        """Guesses what follows the pending tokens; may not change what was observed.

        Args:
            pending: each row's emitted but not yet observed token, node 0 of its draft.
            limits: most draft tokens on any path of each row.
            sampling: the rows' sampling, whose noise a drafter ranks its scores under.

        Returns:
            [B, N] with 1 <= N <= 1 + `nodes`; rows with fewer nodes are padded.
        """
        ...

    def release(self, row: int) -> None:
        """The row's sequence ended or lost its pages; its number will be used again."""
