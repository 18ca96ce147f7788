"""Batch of a training step: documents side by side, and the weight of the guess about each place.

Legend: N tokens of a batch, K steps. The guess of step k about place j is made by slot j - 1 - k: it reads the feature
of that slot and the tokens after it up to j, and guesses token j + 1. The target's own distribution there comes from
its hidden state at j.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Batch(NamedTuple):
    """Documents side by side, without padding.

    Attributes:
        tokens: int64 [N].
        mask: bool [N]: tokens that count as things to guess.
        lengths: tokens of each document.
        seeds: int64 of each document, what its random draws in training depend on; None draws nothing.
    """

    tokens: Tensor
    mask: Tensor
    lengths: tuple[int, ...]
    seeds: Tensor | None = None

    @staticmethod
    def of(
        documents: Sequence[tuple[Tensor, Tensor]], device: torch.device | str = "cpu", seeds: Tensor | None = None
    ) -> Batch:
        """A batch from the tokens and masks of documents."""
        tokens, masks = zip(*documents, strict=True)
        lengths = tuple(len(each) for each in tokens)
        return Batch(torch.cat(tokens).to(device), torch.cat(masks).to(device), lengths, seeds)

    @property
    def positions(self) -> Tensor:
        """[N] places within the documents."""
        return torch.cat([torch.arange(length, device=self.tokens.device) for length in self.lengths])

    @property
    def documents(self) -> Tensor:
        """[N] which document a token belongs to."""
        counts = torch.tensor(self.lengths, device=self.tokens.device)
        return torch.repeat_interleave(torch.arange(len(self.lengths), device=self.tokens.device), counts)

    def ahead(self, steps: int) -> Tensor:
        """[N] the tokens `steps` places later; past the end the last one, which no guess that counts reads."""
        at = torch.arange(steps, steps + len(self.tokens), device=self.tokens.device)
        return self.tokens[at.clamp_(max=len(self.tokens) - 1)]


class GuessWeights(NamedTuple):
    """Weights of the guesses in the loss.

    Attributes:
        weights: float32 [K, N] of the guess of step k about place j; to be divided by the total of all batches of a
            step of the optimiser.
        total: what the weights of the first step sum to, up to the decay: documents, or tokens.
    """

    weights: Tensor
    total: Tensor


def guess_weights(batch: Batch, steps: int, decay: float, *, per_document: bool) -> GuessWeights:
    """Weights decay^k, over their sum, for every guess that a draft within one masked stretch would make.

    A mask moves on with what is guessed: a guess counts if its token and all that its path guessed before are masked.

    Args:
        per_document: every document counts the same, whatever its length; otherwise every token.
    """
    place, mask = batch.positions, batch.mask
    document = batch.documents
    followed = torch.zeros_like(mask)
    followed[:-1] = mask[1:] & (document[1:] == document[:-1])
    counted = [followed & (place >= 1)]
    for _ in range(1, steps):
        before = torch.zeros_like(mask)
        before[1:] = counted[-1][:-1]
        counted.append(before & counted[0])
    weights = torch.stack(counted).float()
    shares = decay ** torch.arange(steps, dtype=torch.float32, device=mask.device)
    shares /= shares.sum()
    if not per_document:
        return GuessWeights(weights * shares.unsqueeze(1), weights[0].sum())
    tokens = torch.zeros(steps, len(batch.lengths), device=mask.device).index_add_(1, document, weights)
    weights = weights / tokens.clamp(min=1)[:, document] * shares.unsqueeze(1)
    return GuessWeights(weights, (tokens[0] > 0).sum().float())


def guessing_slots(steps: int, places: Tensor) -> Tensor:
    """[K, C] slots that guess about `places` [C] at each step; below zero there is no such guess."""
    return places - 1 - torch.arange(steps, device=places.device).unsqueeze(1)
