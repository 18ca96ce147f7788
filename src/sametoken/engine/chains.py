"""Candidates of one row's chain of guesses, and their outcome. Legend: L places, K candidates per place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from sametoken.drafters.base import Proposed


class Said(NamedTuple):
    """Candidates of each place of a row's chain, best first; the first one is the guess of the chain.

    Attributes:
        shares: [L][K] share of each candidate in the drafter's draw, in 0 .. 1; see `model.compiled_guesses.Guesses`.
        tokens: [L][K] token ids; None if only the guesses are available.
        kept: [L] number of candidates in the draft.
    """

    shares: Sequence[Sequence[float]]
    tokens: Sequence[Sequence[int]] | None = None
    kept: Sequence[int] = ()

    def outcome(self, longest: int, accepted: int, emitted: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """Outcome of the draft: the accepted candidates and the verified ones.

        Args:
            longest: guesses on the longest path of the draft.
            accepted: accepted guesses.
            emitted: emitted tokens.

        Returns:
            Rank of the accepted candidate at each place that was reached, K if none was accepted; and the number of
            verified candidates of each place, [L].
        """
        if self.tokens is None:
            return [*[0] * accepted, 1][:longest], [1] * longest
        drawn = list[int]()
        # The token after the accepted ones may equal a candidate that was left out of the draft.
        for token, candidates in zip(emitted, self.tokens, strict=False):
            if not candidates or candidates[0] < 0:
                break
            drawn.append(candidates.index(token) if token in candidates else len(candidates))
            if drawn[-1]:
                break
        return drawn, self.kept


def said_in(proposed: Proposed) -> Iterator[Said]:
    """Iterate over the candidates of each row of a proposal; empty if its drafter reports none."""
    _, shares, ended = proposed
    if shares is None:
        return iter(())
    listed = shares.tolist() if isinstance(shares, Tensor) else shares
    if ended is None:
        return map(Said, listed)
    return map(Said, listed, ended.candidates, ended.kept)
