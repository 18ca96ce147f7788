"""Trees of a step in groups of equal size, so that a row with few guesses is not padded to the largest draft.

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
        places: indices of the rows of the trees among the sampled rows of the step.
        first: index of the first token of the trees among the tokens with logits.
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
        """Index past the last token of the trees."""
        return self.first + self.draft.tokens.numel()

    def of(self, values: Tensor) -> Tensor:
        """Part [len(places), nodes, ...] of values [tokens, ...] for these trees."""
        return values[self.first : self.end].view(len(self.places), self.nodes, *values.shape[1:])


def groups(pending: Sequence[int], guesses: Sequence[Guess], device: torch.device, ragged: bool) -> list[Trees]:
    """Group the trees of rows by size, smallest first; one group unless `ragged`.

    Args:
        pending: [B] root tokens.
        guesses: [B] guesses after each root.
        device: device of the drafts.
        ragged: true for groups of equal size; false to pad all trees to the largest.
    """
    counts = [len(guess.tokens) for guess in guesses]
    sizes = counts if ragged else [max(counts, default=0)] * len(counts)
    found: list[Trees] = []
    for size in sorted(set(sizes)):
        places = [place for place, each in enumerate(sizes) if each == size]
        draft = padded([pending[place] for place in places], [guesses[place] for place in places], device)
        found.append(Trees(places, found[-1].end if found else 0, draft, ancestors(draft.parents)))
    return found
