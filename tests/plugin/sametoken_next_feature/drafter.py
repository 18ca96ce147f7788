"""Drafts of a next-feature head: a chain, each token drawn from a state that the head predicted.

Keeps one state per row and nothing in the KV cache. Legend: B rows, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.drafters.base import ANYONE, Drafter, Proposed, RowOrigin
from sametoken.drafters.padded import chain
from sametoken.model.decoder import Decoder
from sametoken.speculation.draft import PADDING
from sametoken.speculation.sampling import Sampling, rank
from sametoken_next_feature.head import NextFeatureHead


@dataclass(slots=True)
class _Row:
    """One sequence: how many tokens are committed, and the target's output [1, H] at the last of them."""

    length: int
    output: Tensor | None = None


class NextFeatureDrafter(Drafter):
    """Guesses with a next-feature head.

    Args:
        target: the model whose states, token vectors and output layer it uses.
        max_draft_len: longest draft, in tokens.
    """

    runs_model = True

    def __init__(self, head: NextFeatureHead, target: Decoder, max_draft_len: int) -> None:
        self.head, self.target, self.nodes = head, target, max_draft_len
        self.taps = (target.config.num_layers - 1,)  # the last block's output; the target's norm makes it the state
        self._rows: dict[int, _Row] = {}

    def admit(self, row: int, cached: Sequence[int], draft_cached: int = 0, origin: RowOrigin = ANYONE) -> None:
        self._rows[row] = _Row(len(cached))

    def release(self, row: int) -> None:
        self._rows.pop(row, None)

    def observe(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], features: Tensor | None) -> None:
        assert features is not None
        end = 0
        for row, committed in zip(rows, tokens, strict=True):
            end += len(committed)
            if committed:
                self._rows[row] = _Row(self._rows[row].length + len(committed), features[end - 1 : end])

    def slots(self, limit: int) -> int:
        return min(limit, self.nodes)

    def propose(
        self, rows: Sequence[int], pending: Sequence[int], limits: Sequence[int], sampling: Sampling,
        worth: object = None,
    ) -> Proposed:  # fmt: skip
        outputs = [output for row in rows if (output := self._rows[row].output) is not None]
        assert len(outputs) == len(rows), "a row is drafted only after its prompt was observed"
        state = self.target.norm(torch.cat(outputs))
        tokens = torch.tensor(pending, device=state.device)
        # The pending token stands at position `length`, the first guess after it.
        position = torch.tensor([self._rows[row].length + 1 for row in rows], device=state.device)
        drawn: list[list[int]] = []
        for level in range(min(max(limits), self.nodes)):
            state = self.head(self.target.embed(tokens.clamp(min=0)), state)
            tokens = rank(self.target.project(state), position + level, sampling, 1)[0].squeeze(1)
            drawn.append(tokens.tolist())
        chains = zip(*drawn, strict=True) if drawn else [()] * len(rows)
        return Proposed([chain(_allowed(row[:limit])) for row, limit in zip(chains, limits, strict=True)])


def _allowed(tokens: Sequence[int]) -> list[int]:
    """Guesses up to the first that the request bans."""
    return list(tokens[: tokens.index(PADDING)] if PADDING in tokens else tokens)
