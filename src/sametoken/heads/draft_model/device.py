"""A draft model's chain inside a captured step: a fixed number of levels, no value ever seen by the host.

Legend: B lanes, W tokens that a row reads, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sametoken.drafters.base import Drafter
from sametoken.drafters.device import Plain, Proposer
from sametoken.heads.draft_model.drafter import DraftModelDrafter
from sametoken.runtime.cache import Span
from sametoken.runtime.draw import draw
from sametoken.runtime.lanes import Lanes
from sametoken.speculation.draft import Draft
from sametoken.speculation.sampling import Sampling


class DraftChain:
    """A chain of a draft model.

    Every step reads the last committed token again, beside the pending one: whether the step before had come to it
    is known on the device only, and a second node of a forward costs next to nothing.
    """

    def __init__(self, drafter: DraftModelDrafter) -> None:
        self._drafter, self.depth = drafter, drafter.max_draft_len
        self._decoder, self._cache = drafter.decoder, drafter.cache

    def enter(self, row: int) -> None:
        self._drafter.settle(row)

    def told(self, row: int, tokens: Sequence[int], committed: int) -> None:
        self._drafter.resume(row, tokens[:committed])

    def guess(self, lanes: Lanes, sampling: Sampling, keys: int) -> Tensor:
        hidden = self._read(lanes.rows, lanes.lengths - 1, lanes.last, keys)
        tokens: list[Tensor] = []
        for level in range(self.depth):
            at = lanes.lengths + level
            if tokens:
                hidden = self._read(lanes.rows, at, tokens[-1], keys)
            tokens.append(self._draw(hidden, at, sampling))
        return torch.cat(tokens, dim=1)

    def _read(self, rows: Tensor, starts: Tensor, tokens: Tensor, keys: int) -> Tensor:
        """Hidden states [B, H] of the last of `tokens` [B, W], which go to the indexes from `starts` on."""
        batch, width = tokens.shape
        reach = torch.ones(width, width, dtype=torch.bool, device=tokens.device).tril().expand(batch, -1, -1)
        span = Span(rows, (), starts, reach, width, keys)
        return self._decoder.run(tokens.flatten(), self._cache, [span]).last.view(batch, width, -1)[:, -1]

    def _draw(self, hidden: Tensor, at: Tensor, sampling: Sampling) -> Tensor:
        """[B, 1] the draft's own draws after the nodes at positions `at` [B], under the target's noise."""
        logits = self._decoder.logits(hidden)
        root = torch.zeros_like(at).view(-1, 1)
        return draw(logits.unsqueeze(1), Draft(root, root - 1), root.unsqueeze(2) == 0, at, sampling)


def proposers(drafters: Mapping[str, Drafter], plain: str) -> dict[str, Proposer]:
    """The methods that can run on the device: plain decoding, by its name, and chains of a draft model.

    Heads stay with the host: a captured step knows no features of the accepted path.
    """
    found: dict[str, Proposer] = {plain: Plain()}
    for method, drafter in drafters.items():
        if isinstance(drafter, DraftModelDrafter) and drafter.branches == 1:
            found[method] = DraftChain(drafter)
    return found
