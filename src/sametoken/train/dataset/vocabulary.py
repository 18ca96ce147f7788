"""Draft vocabulary: the tokens that a draft can guess, which are the most frequent ones in the target's text.

Legend: V target vocabulary, N draft vocabulary. `d2t` has offsets, as in all engines: the target's id of draft token i
is `i + d2t[i]`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from sametoken.errors import DataError


class DraftVocabulary(NamedTuple):
    """Subset of the target's tokens, by ascending id.

    Attributes:
        d2t: [N] int64, differences between target ids and draft ids.
        t2d: [V] bool, true for target tokens in the subset.
    """

    d2t: Tensor
    t2d: Tensor

    @property
    def ids(self) -> Tensor:
        """Target ids [N] int64 of the draft tokens."""
        return self.d2t + torch.arange(len(self.d2t))

    def coverage(self, counts: Tensor) -> float:
        """Share of the counted tokens that a draft can guess.

        Args:
            counts: [V] how often each token occurs.
        """
        return float(counts[self.t2d].sum()) / max(int(counts.sum()), 1)


def count_tokens(tokens: Tensor, mask: Tensor, vocab_size: int) -> Tensor:
    """Number of occurrences [V] int64 of each token among the masked ones of `tokens` [T]."""
    return torch.bincount(tokens[mask], minlength=vocab_size)


def choose_vocabulary(counts: Tensor, size: int, forced: Iterable[int], *, fill: bool = False) -> DraftVocabulary:
    """Choose the `size` most frequent tokens, lower ids first among equals, with all `forced` ones.

    Args:
        counts: [V] how often each token occurs.
        forced: ids that must be included, for example end tokens.
        fill: if fewer tokens occur, fill up with the lowest ids that do not.

    Raises:
        DataError: the vocabulary of the target is smaller, or fewer tokens occur and `fill` is off.
    """
    vocab_size = len(counts)
    if not 0 < size <= vocab_size:
        raise DataError(f"a draft vocabulary of {size} tokens was asked for, expected 1 to the target's {vocab_size}")
    must = torch.zeros(vocab_size, dtype=torch.bool)
    must[sorted({token for token in forced if token < vocab_size})] = True
    if int(must.sum()) > size:
        raise DataError(
            f"a draft vocabulary of {size} tokens was asked for, but {int(must.sum())} special tokens must be in it; "
            "ask for more"
        )
    there = int(((counts > 0) | must).sum())
    if there < size and not fill:
        raise DataError(
            f"a draft vocabulary of {size} tokens was asked for, but only {there} different tokens occur in what the "
            f"assistant says, special tokens included; ask for at most {there}, add data, or set --fill-vocabulary"
        )
    rank = torch.where(must, torch.iinfo(torch.int64).max, counts)
    ids = torch.argsort(rank, descending=True, stable=True)[:size].sort().values
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[ids] = True
    return DraftVocabulary(ids - torch.arange(size), t2d)
