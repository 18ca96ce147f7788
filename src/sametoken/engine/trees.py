"""The trees of a step in groups of equal size: a row with few guesses is not padded to the widest draft.

A group is a rectangle of one forward. Legend: B rows, N nodes of the largest tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sametoken.speculation.draft import PADDING, Draft, ancestors


class Trees(NamedTuple):
    """Trees of equal size.

    Attributes:
        places: indices of their rows among the sampled rows of the step.
        first: index of their first token among those that the step draws after.
        draft: [len(places), nodes].
        ancestor_mask: [len(places), nodes, nodes] of the draft.
    """

    places: Sequence[int]
    first: int
    draft: Draft
    ancestor_mask: Tensor

    @property
    def nodes(self) -> int:
        return self.draft.tokens.shape[1]

    @property
    def end(self) -> int:
        """Index past the last of their tokens."""
        return self.first + self.draft.tokens.numel()

    def of(self, values: Tensor) -> Tensor:
        """The part [len(places), nodes, ...] of values [tokens, ...]."""
        return values[self.first : self.end].view(len(self.places), self.nodes, *values.shape[1:])


def sizes(draft: Draft) -> list[int]:
    """Number of nodes of each row's tree, the root included, without padding at its end."""
    rows, nodes = draft.tokens.shape
    if nodes == 1:
        return [1] * rows
    real = (draft.tokens != PADDING) * torch.arange(1, nodes + 1, device=draft.tokens.device)
    found: list[int] = real.amax(1).clamp(min=1).tolist()
    return found


def groups(draft: Draft, ragged: bool) -> list[Trees]:
    """Trees of a draft [B, N] grouped by size, smallest first; one rectangle unless `ragged`."""
    rows, nodes = draft.tokens.shape
    counts = sizes(draft) if ragged else [nodes] * rows
    found: list[Trees] = []
    for size in sorted(set(counts)):
        places = [place for place, count in enumerate(counts) if count == size]
        part = draft if len(places) == rows else Draft(draft.tokens[places], draft.parents[places])
        part = Draft(part.tokens[:, :size], part.parents[:, :size])
        found.append(Trees(places, found[-1].end if found else 0, part, ancestors(part.parents)))
    return found
