"""Medusa: heads that guess several places ahead at once from the target's last hidden state, as a static tree.

The tree's nodes are ranks: node (r1, r2, ..) is the token of rank r1 of the first head, then of rank r2 of the second.
Keeps one feature per row and nothing in the cache. Legend: B rows, H hidden size, V vocabulary, K guesses of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.drafters.base import Drafter
from sametoken.drafters.padded import Guess, padded
from sametoken.heads.medusa.module import MedusaHeads
from sametoken.model.decoder import Decoder
from sametoken.speculation.draft import PADDING, Draft
from sametoken.speculation.sampling import Sampling, rank

Path = tuple[int, ...]


@dataclass(slots=True)
class _Row:
    """One sequence: how many tokens are certain, and the feature [1, H] of the last of them."""

    length: int
    feature: Tensor | None = None


class MedusaDrafter(Drafter):
    """Guesses with Medusa heads.

    Args:
        heads: their output layer may be the target's.
        target: the model whose last hidden state they read.
        max_draft_len: longest path taken of the heads' tree.
        budget: most nodes taken of it, the first ones; None is all.
    """

    runs_model = True

    def __init__(self, heads: MedusaHeads, target: Decoder, *, max_draft_len: int, budget: int | None = None) -> None:
        self.heads, self.target = heads, target
        self.taps = (target.config.num_layers - 1,)
        self._tree = tree_of(heads, max_draft_len, budget)
        self.nodes = len(self._tree)
        levels = range(max(map(len, self._tree)))
        self._ranks = [1 + max(path[level] for path in self._tree if len(path) > level) for level in levels]
        self._rows: dict[int, _Row] = {}

    def admit(self, row: int, cached: Sequence[int], held: int = 0) -> None:
        self._rows[row] = _Row(len(cached))

    def release(self, row: int) -> None:
        self._rows.pop(row, None)

    def observe(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], features: Tensor | None) -> None:
        assert features is not None
        end = 0
        for row, certain in zip(rows, tokens, strict=True):
            end += len(certain)
            if certain:
                self._rows[row].length += len(certain)
                self._rows[row].feature = features[end - 1 : end]

    def slots(self, limit: int) -> int:
        return sum(len(path) <= limit for path in self._tree)

    def propose(self, rows: Sequence[int], pending: Sequence[int], limits: Sequence[int], sampling: Sampling) -> Draft:
        states = [self._rows[row] for row in rows]
        found = [state.feature for state in states if state.feature is not None]
        assert len(found) == len(rows), "heads guess from the feature of a token that they were told of"
        position = torch.tensor([state.length + 1 for state in states], device=found[0].device)
        guesses = self._guesses(
            self.target.norm(torch.cat(found)), position, min(max(limits), len(self._ranks)), sampling
        )
        return padded(pending, [self._grown(row, limit) for row, limit in zip(guesses, limits, strict=True)])

    def _guesses(self, hidden: Tensor, position: Tensor, levels: int, sampling: Sampling) -> list[list[list[int]]]:
        """For each row and level the best tokens, best first, ranked under the noise of their own positions.

        Args:
            hidden: [B, H] what the target's output layer reads.
            position: [B] of the first head's guess.
        """
        own = self.heads.config.own_heads
        scores = self.heads.logits(hidden) if own else map(self.target.project, self.heads.states(hidden))
        found = [
            rank(logits, position + level, sampling, count)[0].tolist()
            for level, logits, count in zip(range(levels), scores, self._ranks, strict=False)
        ]
        return [list(level) for level in zip(*found, strict=True)]

    def _grown(self, guesses: Sequence[Sequence[int]], limit: int) -> Guess:
        """The tree over a row's guesses; what was banned takes its descendants with it."""
        nodes: dict[Path, int] = {(): 0}
        guess = Guess([], [])
        for path in self._tree:
            above = nodes.get(path[:-1])
            if above is None or len(path) > limit:
                continue
            token = guesses[len(path) - 1][path[-1]]
            if token != PADDING:
                guess.tokens.append(token)
                guess.parents.append(above)
                nodes[path] = len(guess.tokens)
        return guess


def tree_of(heads: MedusaHeads, max_draft_len: int, budget: int | None) -> tuple[Path, ...]:
    """The nodes of the heads' tree that are used, parents before children."""
    return tuple(path for path in heads.config.tree if len(path) <= max_draft_len)[:budget]
