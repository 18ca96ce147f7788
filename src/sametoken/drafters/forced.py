"""Drafter of the tokens that a request's grammar forces: drafting costs nothing, and all tokens are accepted.

Reads grammars, not texts.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sametoken.drafters.base import ANYONE, Drafter, Proposed, RowOrigin
from sametoken.drafters.padded import chain
from sametoken.options.speculation import SpeculativeConfig
from sametoken.speculation.sampling import Sampling


class ForcedDrafter(Drafter):
    """Chains of forced tokens.

    Args:
        max_draft_len: longest draft.
    """

    def __init__(self, max_draft_len: int) -> None:
        self.nodes = max_draft_len

    def admit(self, row: int, cached: Sequence[int], draft_cached: int = 0, origin: RowOrigin = ANYONE) -> None:
        """Do nothing: the grammar holds the state."""

    def observe(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], features: Tensor | None) -> None:
        """Do nothing: the grammar holds the state."""

    def propose(
        self, rows: Sequence[int], pending: Sequence[int], limits: Sequence[int], sampling: Sampling,
        worth: object = None,
    ) -> Proposed:  # fmt: skip
        """Draft the tokens that each row's grammar forces after the pending token, at most `limits[i]` of them."""
        grammars = sampling.grammars or (None,) * len(rows)
        forced = [[] if g is None else g.forced(self.slots(limit)) for g, limit in zip(grammars, limits, strict=True)]
        return Proposed([chain(tokens) for tokens in forced])

    def release(self, row: int) -> None:
        """Do nothing: the grammar holds the state."""

    def slots(self, limit: int) -> int:
        return min(self.nodes, limit)


def build(config: SpeculativeConfig) -> Drafter:
    """Build the drafter from these settings."""
    return ForcedDrafter(config.longest)
