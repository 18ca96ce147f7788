"""Drafters that try to change the output: wrong, lucky, empty, bushy. They also check what they are told.

Everything an engine tells a drafter must add up to one text per row, and the pending token must follow it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sametoken.drafters.base import ANYONE, Drafter, Proposed, RowOrigin
from sametoken.drafters.padded import Guess, chain
from sametoken.speculation.draft import PADDING, Draft, chain_parents

Truths = Sequence[Sequence[int]]
Guesser = Callable[[list[int], int], Guess]


class Adversary(Drafter):
    """A drafter whose guess is a function of the text so far and the longest path allowed.

    Args:
        guess: the guess after a text, its pending token included.
        nodes: most draft tokens that `guess` makes.
    """

    def __init__(self, guess: Guesser, nodes: int) -> None:
        self.guess, self.nodes = guess, nodes
        self.texts: dict[int, list[int]] = {}

    def admit(self, row: int, cached: Sequence[int], draft_cached: int = 0, origin: RowOrigin = ANYONE) -> None:
        assert row not in self.texts, "a row was admitted twice"
        self.texts[row] = list(cached)

    def observe(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], features: Tensor | None) -> None:
        assert len(set(rows)) == len(rows)
        for row, certain in zip(rows, tokens, strict=True):
            self.texts[row].extend(certain)

    def propose(
        self, rows: Sequence[int], pending: Sequence[int], limits: Sequence[int], sampling: object, worth: object = None
    ) -> Proposed:
        each = zip(rows, pending, limits, strict=True)
        return Proposed([self.guess([*self.texts[row], root], limit) for row, root, limit in each])

    def release(self, row: int) -> None:
        del self.texts[row]


class PaddingOnly(Adversary):
    """Proposes drafts that hold nothing but their roots, however wide, as tensors: the former protocol."""

    def __init__(self, nodes: int) -> None:
        super().__init__(lambda text, limit: Guess([], []), nodes)

    def propose(self, rows: Sequence[int], pending: Sequence[int], limits: Sequence[int], sampling: object) -> Draft:
        tokens = torch.full((len(rows), 1 + self.nodes), PADDING)
        tokens[:, 0] = torch.tensor(pending)
        return Draft(tokens, chain_parents(*tokens.shape))


def future(truths: Truths, text: list[int], limit: int) -> list[int]:
    """What follows `text` in the truth that begins with it."""
    for truth in truths:
        if list(truth[: len(text)]) == text:
            return list(truth[len(text) : len(text) + limit])
    return []


def adversaries(truths: Truths, vocab_size: int, depth: int, nodes: int, seed: int = 0) -> dict[str, Adversary]:
    """One of every kind.

    Args:
        truths: prompt and output of every request, which the lucky ones replay.
        depth: longest path; `nodes` is the size of a tree.
    """
    chance = random.Random(seed)

    def noise(text: list[int], limit: int) -> Guess:
        return chain([chance.randrange(vocab_size) for _ in range(limit)])

    def wrong_at(place: int) -> Guesser:
        def guess(text: list[int], limit: int) -> Guess:
            tokens = future(truths, text, limit)
            return chain([(t + 1) % vocab_size if i == place else t for i, t in enumerate(tokens)])

        return guess

    def bush(text: list[int], limit: int) -> Guess:
        """A random tree around the truth, with siblings that repeat each other."""
        truth = future(truths, text, limit)
        tokens, parents, depths = [], [], [0]
        for node in range(nodes):
            parent = chance.choice([p for p in range(node + 1) if depths[p] < limit])
            level = depths[parent]
            lucky = level < len(truth) and chance.random() < 0.6
            tokens.append(truth[level] if lucky else chance.randrange(vocab_size))
            parents.append(parent)
            depths.append(level + 1)
        return Guess(tokens, parents)

    return {
        "random": Adversary(noise, depth),
        "constant": Adversary(lambda text, limit: chain([7] * limit), depth),
        "padding": PaddingOnly(nodes),
        "right": Adversary(lambda text, limit: chain(future(truths, text, limit)), depth),
        **{f"wrong_at_{d}": Adversary(wrong_at(d), depth) for d in (0, 1, depth - 1)},
        "bush": Adversary(bush, nodes),
    }
