"""A tree of guesses under growth, best first: what a drafter with scores expands, and what it keeps in the end.

Knows scores and places, not who makes them. Legend: B rows, K branches, C candidates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sametoken.speculation.draft import PADDING, Draft, chain_parents


class Tree:
    """A tree under growth: all candidates so far, level by level, and the frontier that is expanded next.

    Args:
        pending: [B] root tokens.
        limits: [B] longest path of each row.
        branches: K, candidates of a level that are expanded.

    Attributes:
        level: levels grown so far.
        tokens, parents, scores: [B, C] of all candidates; candidate 0 is the root.
        forwarded: [B, C] the place of a candidate among the nodes that ran, or -1.
        origin: [B, K] whose child each frontier node is: a place in the frontier before it.
    """

    def __init__(self, pending: Tensor, limits: Tensor, branches: int) -> None:
        rows = pending.shape[0]
        self.limits, self.branches, self.level = limits, branches, 0
        device = pending.device
        self.tokens, self.parents = pending.unsqueeze(1), torch.full((rows, 1), -1, device=device)
        self.scores = torch.zeros(rows, 1, device=device)
        self.forwarded = torch.full((rows, 1), -1, device=device)
        self.reach = torch.zeros(rows, 0, 0, dtype=torch.bool, device=device)
        self.origin = torch.zeros_like(self.tokens)
        self._frontier = torch.zeros_like(self.tokens)  # candidates expanded by the next `grow`

    def grow(self, tokens: Tensor, scores: Tensor) -> None:
        """Adds K children [B, frontier, K] to every frontier node and takes the K best of them as the next frontier."""
        branches = tokens.shape[2]
        total = self.scores.gather(1, self._frontier).unsqueeze(2) + scores
        total = total.masked_fill((self.limits <= self.level).view(-1, 1, 1), float("-inf")).flatten(1)
        first = self.tokens.shape[1]
        self.tokens = torch.cat([self.tokens, tokens.flatten(1)], dim=1)
        self.scores = torch.cat([self.scores, total], dim=1)
        parents = self._frontier.repeat_interleave(branches, dim=1)
        self.parents = torch.cat([self.parents, parents], dim=1)
        self.forwarded = torch.cat([self.forwarded, torch.full_like(parents, -1)], dim=1)
        best = total.topk(branches, dim=1).indices
        self._frontier, self.origin = first + best, best // branches
        self.level += 1

    def enter_frontier(self) -> tuple[Tensor, Tensor]:
        """The frontier takes its place in the cache: its tokens [B, K] and the reach of all nodes that ever ran."""
        rows, width = self._frontier.shape
        size = self.reach.shape[1]
        above = self.forwarded.gather(1, self.parents.gather(1, self._frontier))  # -1: the committed root
        grown = self.reach.new_zeros(rows, size + width, size + width)
        grown[:, :size, :size] = self.reach
        if size:
            inherited = self.reach.gather(1, above.clamp(min=0).unsqueeze(2).expand(-1, -1, size))
            grown[:, size:, :size] = inherited & (above >= 0).unsqueeze(2)
        grown[:, size:, size:] = torch.eye(width, dtype=torch.bool, device=grown.device)
        self.reach = grown
        place = size + torch.arange(width, device=grown.device)
        self.forwarded.scatter_(1, self._frontier, place.expand(rows, -1))
        return self.tokens.gather(1, self._frontier), grown

    def best(self, budgets: Sequence[int]) -> tuple[Draft, Tensor]:
        """Each row's root and its `budgets[b]` best candidates as a draft, and their candidate numbers [B, N].

        A child never scores above its parent and a tie goes to the earlier candidate, so the choice is a tree.
        """
        rows, count = self.tokens.shape
        keep = min(max(budgets), count - 1)
        best = self.scores[:, 1:].sort(dim=1, descending=True, stable=True)
        order = best.indices[:, :keep] + 1
        # What is over a row's budget, or was banned, goes to the end, where padding belongs.
        over = torch.arange(keep, device=order.device) >= torch.tensor(budgets, device=order.device).unsqueeze(1)
        over |= best.values[:, :keep] == float("-inf")
        keep = int((~over).sum(1).max())
        taken = (order + over * count).sort(dim=1).values[:, :keep]
        chosen = torch.cat([torch.zeros_like(self.tokens[:, :1]), taken % count], dim=1)
        place = torch.arange(keep + 1, device=chosen.device).expand(rows, -1)
        node = torch.zeros_like(self.tokens).scatter(1, chosen, place)
        parents = node.gather(1, self.parents.gather(1, chosen).clamp(min=0))
        dead = torch.cat([torch.zeros_like(over[:, :1]), taken >= count], dim=1)
        tokens = self.tokens.gather(1, chosen).masked_fill(dead, PADDING)
        parents = torch.where(dead, chain_parents(rows, keep + 1, chosen.device), parents)
        parents[:, 0] = -1
        return Draft(tokens, parents), chosen
