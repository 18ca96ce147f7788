"""One rectangular `Draft` from ragged guesses on the host, whatever their drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sametoken.speculation.draft import PADDING, Draft


class Guess(NamedTuple):
    """The draft tokens of one row, without the root.

    Attributes:
        tokens: draft token i is node i + 1 of the draft.
        parents: the node that each follows; 0 is the pending token.
    """

    tokens: list[int]
    parents: list[int]


def chain(tokens: list[int]) -> Guess:
    """Guess in which every token follows the one before it."""
    return Guess(tokens, list(range(len(tokens))))


def padded(pending: Sequence[int], guesses: Sequence[Guess]) -> Draft:
    """Draft [B, N] on the CPU, N = 1 + tokens of the largest guess; padding continues the last node as a chain.

    Args:
        pending: [B] root tokens.
        guesses: [B] guesses after each.
    """
    rows = len(guesses)
    nodes = 1 + max((len(guess.tokens) for guess in guesses), default=0)
    tokens = [[root, *guess.tokens] for root, guess in zip(pending, guesses, strict=True)]
    parents = [[-1, *guess.parents] for guess in guesses]
    for row_tokens, row_parents in zip(tokens, parents, strict=True):
        row_parents.extend(range(len(row_tokens) - 1, nodes - 1))
        row_tokens.extend([PADDING] * (nodes - len(row_tokens)))
    # The view gives an empty batch its second dimension.
    return Draft(
        torch.tensor(tokens, dtype=torch.int64).view(rows, nodes),
        torch.tensor(parents, dtype=torch.int64).view(rows, nodes),
    )
