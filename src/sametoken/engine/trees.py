"""The trees of a step in groups of equal size: a row with few guesses is not padded to the widest draft.

A group is a rectangle of one forward. Legend: B rows, N nodes of the largest tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sametoken.drafters.padded import Guess, padded
from sametoken.speculation.draft import Draft, ancestors


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


def groups(pending: Sequence[int], guesses: Sequence[Guess], device: torch.device, ragged: bool) -> list[Trees]:
    """Trees of the rows grouped by size, smallest first; one rectangle unless `ragged`.

    Args:
        pending: [B] root tokens. `guesses`: [B] guesses after each.
    """
    counts = [len(guess.tokens) for guess in guesses]
    sizes = counts if ragged else [max(counts, default=0)] * len(counts)
    found: list[Trees] = []
    for size in sorted(set(sizes)):
        places = [place for place, each in enumerate(sizes) if each == size]
        draft = padded([pending[place] for place in places], [guesses[place] for place in places], device)
        found.append(Trees(places, found[-1].end if found else 0, draft, ancestors(draft.parents)))
    return found
