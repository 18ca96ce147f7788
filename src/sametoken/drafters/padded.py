"""Draft trees on the host as ragged lists of integers, and their conversion to the rectangular `Draft` of a forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sametoken.speculation.draft import PADDING, Draft, chain_parents


class Guess(NamedTuple):
    """Draft tree of one row, without the root.

    Attributes:
        tokens: draft token i is node i + 1 of the draft.
        parents: parent node of each token; 0 is the pending token.
    """

    tokens: list[int]
    parents: list[int]


def chain(tokens: list[int]) -> Guess:
    """Guess in which every token is the child of the previous one."""
    return Guess(tokens, list(range(len(tokens))))


NO_GUESS = chain([])


def padded(pending: Sequence[int], guesses: Sequence[Guess], device: torch.device | str = "cpu") -> Draft:
    """Draft [B, N] with N = 1 + tokens of the largest guess; padding continues the last node as a chain.

    Args:
        pending: [B] root tokens.
        guesses: [B] guesses after these tokens.
    """
    most = max((len(guess.tokens) for guess in guesses), default=0)
    shape, chained = (len(guesses), 1 + most), list(range(most))
    tokens = [
        [root, *guess.tokens, *[PADDING] * (most - len(guess.tokens))]
        for root, guess in zip(pending, guesses, strict=True)
    ]
    # The view gives an empty batch its second dimension.
    nodes = torch.tensor(tokens, dtype=torch.int64, device=device).view(shape)
    if all(guess.parents == chained[: len(guess.parents)] for guess in guesses):
        return Draft(nodes, chain_parents(*shape, device))
    parents = [[-1, *guess.parents, *chained[len(guess.parents) :]] for guess in guesses]
    return Draft(nodes, torch.tensor(parents, dtype=torch.int64, device=device))


def guesses_of(draft: Draft) -> list[Guess]:
    """Guess of each row of a draft, up to the first padding; reads values on the host."""
    rows = zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True)
    found = [(tokens, parents, [*tokens, PADDING].index(PADDING)) for tokens, parents in rows]
    return [Guess(tokens[1:nodes], parents[1:nodes]) for tokens, parents, nodes in found]
