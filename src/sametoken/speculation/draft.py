"""Trees of draft tokens. Depth, ancestors and paths of the nodes are functions of `parents` alone.

Shapes: B rows, N nodes. A chain is `parents = arange(N) - 1`; plain decoding is the tree of one node.
"""

from __future__ import annotations

from collections.abc import Callable
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
