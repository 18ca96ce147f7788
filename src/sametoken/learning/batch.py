"""Batch of a training step: concatenated documents, and the weight of each guess.

Legend: N tokens of a batch, K steps. The guess of step k about place j is made by slot j - 1 - k from the feature of
the slot and the tokens after it up to j; the guess is token j + 1. The target's distribution for it follows from the
hidden state at j.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Batch(NamedTuple):
    """Concatenated documents, without padding.

    Attributes:
        tokens: int64 [N].
        mask: bool [N], true for tokens whose guesses count.
        lengths: number of tokens of each document.
        seeds: int64 seed of each document for random draws in training; None for no draws.
    """

    tokens: Tensor
    mask: Tensor
    lengths: tuple[int, ...]
    seeds: Tensor | None = None

    @staticmethod
    def of(
        documents: Sequence[tuple[Tensor, Tensor]], device: torch.device | str = "cpu", seeds: Tensor | None = None
    ) -> Batch:
        """Batch from the tokens and masks of documents."""
        tokens, masks = zip(*documents, strict=True)
        lengths = tuple(len(each) for each in tokens)
        return Batch(torch.cat(tokens).to(device), torch.cat(masks).to(device), lengths, seeds)

    @property
    def positions(self) -> Tensor:
        """Positions [N] within the documents."""
        return torch.cat([torch.arange(length, device=self.tokens.device) for length in self.lengths])

    @property
    def documents(self) -> Tensor:
        """Document number [N] of each token."""
        counts = torch.tensor(self.lengths, device=self.tokens.device)
        return torch.repeat_interleave(torch.arange(len(self.lengths), device=self.tokens.device), counts)

    def ahead(self, steps: int) -> Tensor:
        """Tokens [N] `steps` places later; past the end the last one, which no counted guess reads."""
        at = torch.arange(steps, steps + len(self.tokens), device=self.tokens.device)
        return self.tokens[at.clamp_(max=len(self.tokens) - 1)]


class GuessWeights(NamedTuple):
    """Weights of the guesses in the loss.

    Attributes:
        weights: float32 [K, N] weight of the guess of step k about place j, to be divided by the total of all batches
            of a step of the optimiser.
        total: sum of the weights of the first step, up to the decay: number of documents, or of tokens.
    """

    weights: Tensor
    total: Tensor


def guess_weights(batch: Batch, steps: int, decay: float, *, per_document: bool) -> GuessWeights:
    """Normalised weights decay^k for every guess of a draft within one masked run.

    A guess counts if its token and all earlier guesses of its path are masked.

    Args:
        per_document: give all documents equal weight, independent of length; otherwise all tokens.
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
    """Slots [K, C] of the guesses about `places` [C] at each step; negative if there is no such guess."""
    return places - 1 - torch.arange(steps, device=places.device).unsqueeze(1)
