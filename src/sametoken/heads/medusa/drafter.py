"""Medusa: drafting of a static tree with heads that guess several places ahead from the target's last hidden state.

Nodes of the tree are ranks: node (r1, r2, ..) is the token of rank r1 of the first head, then of rank r2 of the second.
Row state is one feature; there is no KV. Legend: B rows, N nodes, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from sametoken.drafters.base import ANYONE, Drafter, Proposed, RowOrigin
from sametoken.drafters.device import Proposer
from sametoken.drafters.padded import guesses_of
from sametoken.drafters.tree import assembled
from sametoken.heads.medusa.module import MedusaHeads
from sametoken.model.decoder import Decoder
from sametoken.runtime.graph_slots import GraphSlots
from sametoken.speculation.draft import PADDING, Draft
from sametoken.speculation.sampling import Sampling, rank

Path = tuple[int, ...]


class Shape(NamedTuple):
    """Shape of a tree, without its tokens.

    Attributes:
        ranks: number of tokens that each level takes from its head.
        place: [N - 1] index, among the tokens of all levels, of each node but the root.
        depth: [N - 1] depths of these nodes.
        parents: [N] parents of all nodes.
        ancestor_mask: [N - 1, N - 1] `ancestors` without the root.
    """

    ranks: Sequence[int]
    place: Tensor
    depth: Tensor
    parents: Tensor
    ancestor_mask: Tensor


@dataclass(slots=True)
class LastFeature:
    """State of one sequence: number of committed tokens, and the feature [1, H] of the last one."""

    length: int
    feature: Tensor | None = None


class MedusaDrafter(Drafter):
    """Drafter with Medusa heads.

    Args:
        heads: Medusa heads; their output layer may be the target's.
        target: model whose last hidden state the heads read.
        max_draft_len: longest path of the heads' tree that is used.
        budget: number of nodes of the tree that are used, from the first on; None for all.
    """

    runs_model = True

    def __init__(self, heads: MedusaHeads, target: Decoder, *, max_draft_len: int, budget: int | None = None) -> None:
        self.heads, self.target = heads, target
        self.taps = (target.config.num_layers - 1,)
        self._tree = tree_of(heads, max_draft_len, budget)
        self.nodes = len(self._tree)
        levels, device = max(map(len, self._tree)), target.embed.device
        self.shapes = [_shape(self._tree, count, device) for count in range(1, levels + 1)]
        self.states: dict[int, LastFeature] = {}

    def admit(self, row: int, cached: Sequence[int], draft_cached: int = 0, origin: RowOrigin = ANYONE) -> None:
        self.states[row] = LastFeature(len(cached))

    def release(self, row: int) -> None:
        self.states.pop(row, None)

    def observe(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], features: Tensor | None) -> None:
        assert features is not None
        end = 0
        for row, committed in zip(rows, tokens, strict=True):
            end += len(committed)
            if committed:
                self.states[row].length += len(committed)
                self.states[row].feature = features[end - 1 : end]

    def slots(self, limit: int) -> int:
        return sum(len(path) <= limit for path in self._tree)

    def propose(
        self, rows: Sequence[int], pending: Sequence[int], limits: Sequence[int], sampling: Sampling,
        worth: object = None,
    ) -> Proposed:  # fmt: skip
        states = [self.states[row] for row in rows]
        found = [state.feature for state in states if state.feature is not None]
        assert len(found) == len(rows), "heads guess from the feature of a token that they observed"
        root, most, lengths = (
            torch.tensor(values, device=found[0].device)
            for values in (pending, limits, [state.length for state in states])
        )
        shape = self.shapes[min(max(limits), len(self.shapes)) - 1]
        draft = self.draft(torch.cat(found), root, lengths, most, sampling, shape)
        left_out = draft.tokens[:, 1:] == PADDING
        if left_out.any():
            order = torch.arange(1, 1 + left_out.shape[1], device=left_out.device).expand_as(left_out)
            draft = assembled(*draft, order, left_out)[0]
        return Proposed(guesses_of(draft))

    def captured(self) -> Proposer:
        return CapturedMedusa(self)

    def draft(
        self, feature: Tensor, pending: Tensor, lengths: Tensor, limits: Tensor, sampling: Sampling, shape: Shape
    ) -> Draft:
        """Draft the static tree [B, N] without reading a value on the host.

        Nodes past a row's limit, banned tokens and their descendants are padding.

        Args:
            feature: [B, H] hidden states of the rows' last committed tokens, before the target's final norm.
            lengths: [B] number of committed tokens of each row.
        """
        hidden = self.target.norm(feature)
        own = self.heads.config.own_heads
        scores = self.heads.logits(hidden) if own else map(self.target.project, self.heads.states(hidden))
        found = [
            rank(logits, lengths + 1 + level, sampling, count)[0]
            for level, (count, logits) in enumerate(zip(shape.ranks, scores, strict=False))
        ]
        tokens = torch.cat(found, dim=1)[:, shape.place]
        wrong = (tokens == PADDING) | (shape.depth > limits.unsqueeze(1))
        tokens = tokens.masked_fill((wrong.unsqueeze(1) & shape.ancestor_mask).any(2), PADDING)
        return Draft(torch.cat([pending.unsqueeze(1), tokens], dim=1), shape.parents.expand(len(tokens), -1))


class CapturedMedusa(Proposer):
    """Proposer of the static tree inside a captured step, which stores the input feature of the heads."""

    chain = False

    def __init__(self, drafter: MedusaDrafter) -> None:
        self._drafter, self._shape, self.taps = drafter, drafter.shapes[-1], drafter.taps
        self.depth, self.nodes = len(drafter.shapes), 1 + drafter.nodes
        self.slots = self.nodes

    def enter(self, row: int) -> Tensor | None:
        return self._drafter.states[row].feature

    def guess(self, graph_slots: GraphSlots, sampling: Sampling, keys: int) -> Draft:
        feature = graph_slots.latest(1).features.squeeze(1)
        return self._drafter.draft(
            feature, graph_slots.pending, graph_slots.lengths, graph_slots.longest, sampling, self._shape
        )

    def committed(self, row: int, start: int, tokens: Sequence[int]) -> None:
        self._drafter.states[row].length = start + len(tokens)

    def leave(self, row: int, features: Tensor) -> None:
        self._drafter.states[row].feature = features[-1:]


def _shape(tree: Sequence[Path], levels: int, device: torch.device) -> Shape:
    """Shape of the first levels of a tree."""
    paths = [path for path in tree if len(path) <= levels]
    ranks = [1 + max(path[level] for path in paths if len(path) > level) for level in range(levels)]
    first, number = [0, *accumulate(ranks)], {path: node for node, path in enumerate([(), *paths])}
    place = [first[len(path) - 1] + path[-1] for path in paths]
    parents = [-1, *(number[path[:-1]] for path in paths)]
    ancestor_mask = [[path[: len(other)] == other for other in paths] for path in paths]
    depth = [len(path) for path in paths]
    at, deep, above, on = (torch.tensor(values, device=device) for values in (place, depth, parents, ancestor_mask))
    return Shape(ranks, at, deep, above, on)


def tree_of(heads: MedusaHeads, max_draft_len: int, budget: int | None) -> tuple[Path, ...]:
    """Nodes of the heads' tree that are used, parents before children."""
    return tuple(path for path in heads.config.tree if len(path) <= max_draft_len)[:budget]
