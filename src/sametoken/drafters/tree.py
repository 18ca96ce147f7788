"""Growth of draft trees level by level: the nodes to expand next, and the final draft.

Works on tokens, scores and places of any model; reads no value on the host. Legend: B rows, K branches, C
candidates, F nodes of a frontier, N nodes of a draft, H hidden size.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from sametoken.control.worth import EndedChains
from sametoken.speculation.draft import PADDING, Draft, chain_mask, chain_parents


class Grown(NamedTuple):
    """Draft, with the nodes that ran through the draft model.

    Attributes:
        written: [B, N] slot past the row's length with the KV of each node, -1 for none.
        shares: see `Proposed`.
        ended: see `Proposed`.
    """

    draft: Draft
    written: Tensor
    shares: Tensor | None = None
    ended: EndedChains | None = None


class Chain:
    """Tree of one branch: every node has one child, so no candidates are compared.

    Args:
        pending: [B] root tokens.
        limits: [B] longest path of each row, None if every row takes all levels.
    """

    branches = 1

    def __init__(self, pending: Tensor, limits: Tensor | None) -> None:
        self.limits, self._tokens = limits, [pending.unsqueeze(1)]

    def grow(self, tokens: Tensor, scores: Tensor) -> None:
        """Add the child [B, 1, 1] of the last node."""
        self._tokens.append(tokens.squeeze(2))

    def enter_frontier(self) -> tuple[Tensor, Tensor]:
        """Assign the last node a cache slot; return its token [B, 1] and the ancestors of all nodes that ran."""
        last = self._tokens[-1]
        return last, chain_mask(last.shape[0], len(self._tokens) - 1, last.device)

    def above(self, output: Tensor) -> Tensor:
        """Output of the last node's parent."""
        return output

    def grown(self) -> Grown:
        return chain_of(torch.cat(self._tokens, dim=1), self.limits)


def chain_of(tokens: Tensor, limits: Tensor | None) -> Grown:
    """Chain of `tokens` [B, N], root first, padded past each row's limit; all nodes but the last ran."""
    rows, nodes = tokens.shape
    if limits is not None:
        place = torch.arange(nodes, device=tokens.device)
        tokens = tokens.masked_fill(place > limits.unsqueeze(1), PADDING)
    written = (_kept_written if tokens.device.type == "cpu" else _written)(nodes, tokens.device)
    return Grown(Draft(tokens, chain_parents(rows, nodes, tokens.device)), written.expand(rows, -1))


def _written(nodes: int, device: torch.device) -> Tensor:
    """`Grown.written` [N] of a chain: the root's KV is committed already, and the last node did not run."""
    place = torch.arange(nodes, device=device)
    return torch.where(place < nodes - 1, place - 1, -1)


_kept_written = lru_cache(maxsize=64)(_written)


class Tree:
    """Tree under best-first growth: all candidates so far, level by level, and the frontier to expand next.

    Args:
        pending: [B] root tokens.
        limits: [B] longest path of each row.
        branches: K, candidates expanded per level.
        budgets: [B] candidates that each row keeps in the end.
        most: upper bound of `budgets`.

    Attributes:
        tokens, parents, scores: [B, C] all candidates; candidate 0 is the root.
        forwarded: [B, C] index of a candidate among the nodes that ran, or -1.
    """

    def __init__(self, pending: Tensor, limits: Tensor, branches: int, budgets: Tensor, most: int) -> None:
        rows = pending.shape[0]
        self.limits, self.branches, self._budgets, self._most = limits, branches, budgets, most
        device = pending.device
        self.tokens, self.parents = pending.unsqueeze(1), torch.full((rows, 1), -1, device=device)
        self.scores = torch.zeros(rows, 1, device=device)
        self.forwarded = torch.full((rows, 1), -1, device=device)
        self._level = 0
        self._ancestors = torch.zeros(rows, 0, 0, dtype=torch.bool, device=device)
        self._frontier = torch.zeros_like(self.tokens)  # candidates expanded by the next `grow`
        self._origin = self._frontier  # parent of each, as an index into the previous frontier

    def grow(self, tokens: Tensor, scores: Tensor) -> None:
        """Add K children [B, F, K] to every frontier node; the K best of all become the next frontier."""
        branches = tokens.shape[2]
        total = self.scores.gather(1, self._frontier).unsqueeze(2) + scores
        total = total.masked_fill((self.limits <= self._level).view(-1, 1, 1), float("-inf")).flatten(1)
        first = self.tokens.shape[1]
        self.tokens = torch.cat([self.tokens, tokens.flatten(1)], dim=1)
        self.scores = torch.cat([self.scores, total], dim=1)
        parents = self._frontier.repeat_interleave(branches, dim=1)
        self.parents = torch.cat([self.parents, parents], dim=1)
        self.forwarded = torch.cat([self.forwarded, torch.full_like(parents, -1)], dim=1)
        best = total.topk(branches, dim=1).indices
        self._frontier, self._origin = first + best, best // branches
        self._level += 1

    def enter_frontier(self) -> tuple[Tensor, Tensor]:
        """Assign the frontier cache slots; return its tokens [B, F] and the ancestors of all nodes that ran."""
        rows, width = self._frontier.shape
        size = self._ancestors.shape[1]
        above = self.forwarded.gather(1, self.parents.gather(1, self._frontier))  # -1: the committed root
        grown = self._ancestors.new_zeros(rows, size + width, size + width)
        grown[:, :size, :size] = self._ancestors
        if size:
            inherited = self._ancestors.gather(1, above.clamp(min=0).unsqueeze(2).expand(-1, -1, size))
            grown[:, size:, :size] = inherited & (above >= 0).unsqueeze(2)
        grown[:, size:, size:] = torch.eye(width, dtype=torch.bool, device=grown.device)
        self._ancestors = grown
        place = size + torch.arange(width, device=grown.device)
        self.forwarded.scatter_(1, self._frontier, place.expand(rows, -1))
        return self.tokens.gather(1, self._frontier), grown

    def above(self, output: Tensor) -> Tensor:
        """Outputs of the parents of the frontier's nodes, from the outputs [B, F, H] of the previous frontier."""
        return output.gather(1, self._origin.unsqueeze(2).expand(-1, -1, output.shape[2]))

    def grown(self) -> Grown:
        """Draft of each row's root and best candidates, as many as its budget.

        A child never scores above its parent, and the earlier candidate wins a tie, so the chosen nodes form a tree.
        """
        keep = min(self._most, self.tokens.shape[1] - 1)
        best = self.scores[:, 1:].sort(dim=1, descending=True, stable=True)
        left_out = torch.arange(keep, device=self.tokens.device) >= self._budgets.unsqueeze(1)
        left_out |= best.values[:, :keep] == float("-inf")  # banned, or past the row's limit
        draft, chosen = assembled(self.tokens, self.parents, best.indices[:, :keep] + 1, left_out)
        return Grown(draft, self.forwarded.gather(1, chosen))


def assembled(tokens: Tensor, parents: Tensor, chosen: Tensor, left_out: Tensor) -> tuple[Draft, Tensor]:
    """Trees of the root and the chosen candidates in their order, with padding at the end.

    Args:
        tokens, parents: [B, C] all candidates, parents before children; candidate 0 is the root.
        chosen: [B, N - 1] distinct candidates; the parent of a chosen candidate is the root or chosen too.
        left_out: [B, N - 1] true for chosen candidates to omit.

    Returns:
        Drafts [B, N], and the candidate number of each node, undefined for padding.
    """
    rows, count = tokens.shape
    order = (chosen + left_out * count).sort(dim=1).values
    root = torch.zeros_like(order[:, :1])
    chosen = torch.cat([root, order % count], dim=1)
    padding = torch.cat([root > 0, order >= count], dim=1)
    nodes = chosen.shape[1]
    place = torch.arange(nodes, device=tokens.device).expand(rows, -1)
    node = torch.zeros_like(tokens).scatter(1, chosen, place)
    above = node.gather(1, parents.gather(1, chosen).clamp(min=0))
    found = torch.where(padding, chain_parents(rows, nodes, tokens.device), above)
    found[:, 0] = -1
    return Draft(tokens.gather(1, chosen).masked_fill(padding, PADDING), found), chosen
