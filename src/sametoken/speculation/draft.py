"""Trees of draft tokens, and their union. Depth, ancestors and paths of the nodes are functions of `parents` alone.

Shapes: B rows, N nodes. A chain is `parents = arange(N) - 1`; plain decoding is the tree of one node.
In the union of several trees of one row, equal tokens after equal paths are one node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

PADDING = -1


class Draft(NamedTuple):
    """A tree of guesses per row.

    Attributes:
        tokens: [B, N] int64; node 0 is the pending token: emitted, not yet in the target's cache. Padding is -1.
        parents: [B, N] int64; `parents[:, 0] == -1` and `parents[b, n] < n`, so ascending nodes are a path's order.
    """

    tokens: Tensor
    parents: Tensor


def chain_parents(rows: int, nodes: int, device: torch.device | str = "cpu") -> Tensor:
    """Parents [rows, nodes] of a chain: every node follows the one before it."""
    return _made(_before, nodes, device).expand(rows, nodes)


def _before(nodes: int, device: torch.device | str) -> Tensor:
    return torch.arange(-1, nodes - 1, device=device)


def _triangle(nodes: int, device: torch.device | str) -> Tensor:
    return torch.ones(nodes, nodes, dtype=torch.bool, device=device).tril()


def _made(make: Callable[..., Tensor], nodes: int, device: torch.device | str) -> Tensor:
    """Result of `make`, cached on the CPU only: a captured step must not share tensors between calls."""
    return _kept(make, nodes) if torch.device(device).type == "cpu" else make(nodes, device)


@lru_cache(maxsize=128)
def _kept(make: Callable[..., Tensor], nodes: int) -> Tensor:
    return make(nodes, "cpu")


def chain_mask(rows: int, nodes: int, device: torch.device | str = "cpu") -> Tensor:
    """Ancestor masks [rows, nodes, nodes] of chains."""
    return _made(_triangle, nodes, device).expand(rows, -1, -1)


def ancestors(parents: Tensor) -> Tensor:
    """[B, N, N] bool: `out[b, n, m]` is true when m lies on the path from the root to n, n itself included.

    Doubling the reach of the parent relation log2(N) times replaces a walk of N steps.
    """
    rows, nodes = parents.shape
    if parents.device.type == "cpu" and torch.equal(parents, chain_parents(rows, nodes)):  # a CPU read is free
        return chain_mask(rows, nodes)
    index = torch.arange(nodes, device=parents.device)
    ancestor_mask = (parents.unsqueeze(2) == index) | (index.unsqueeze(1) == index)
    span = 1
    while span < nodes - 1:
        step = ancestor_mask.to(torch.float32)
        ancestor_mask = torch.matmul(step, step) > 0
        span *= 2
    return ancestor_mask


def depth(ancestor_mask: Tensor) -> Tensor:
    """Number of edges [B, N] between each node and the root, from `ancestors`."""
    return ancestor_mask.sum(-1) - 1


class Union(NamedTuple):
    """Tree of N nodes of one row, united from the trees of P drafters.

    Attributes:
        tokens, parents: [N - 1] of all nodes but the root, parents before their children.
        said: [N] bit mask of the drafters that proposed each node: bit p for drafter p; the root has all bits.
        longest: [P] tokens on the longest path that each drafter proposed.
    """

    tokens: list[int]
    parents: list[int]
    said: list[int]
    longest: list[int]

    def parts(self, drafters: Sequence[str], path: Sequence[int]) -> dict[str, tuple[int, int]]:
        """Longest path of each drafter, and the number of its draft tokens on `path` (nodes, root first)."""
        return {
            drafter: (self.longest[part], sum(self.said[node] >> part & 1 for node in path) - 1)
            for part, drafter in enumerate(drafters)
        }


def union(trees: Sequence[tuple[Sequence[int], Sequence[int]]], most: int) -> Union:
    """Unite the draft trees of one row by path.

    Args:
        trees: tokens and parents of each drafter's tree after the same root, as in a `Guess`.
        most: greatest number of draft tokens; later ones are left out.
    """
    tokens, parents, depths = list[int](), list[int](), [0]
    said, longest = [(1 << len(trees)) - 1], [0] * len(trees)
    known: dict[tuple[int, int], int] = {}  # node by (parent, token)
    for part, (guesses, above) in enumerate(trees):
        places = [0]  # node in the union for each node of this tree, -1 for none
        for token, parent in zip(guesses, above, strict=True):
            before = places[parent]
            node = known.get((before, token), -1)
            if node < 0 <= before and len(tokens) < most:
                tokens.append(token)
                parents.append(before)
                node = known[before, token] = len(tokens)
                depths.append(depths[before] + 1)
                said.append(0)
            places.append(node)
            if node > 0:
                said[node] |= 1 << part
                longest[part] = max(longest[part], depths[node])
    return Union(tokens, parents, said, longest)
