"""A tree as its root-to-leaf chains: the form in which attention gives a node the same bits as plain decoding would.

A sum over keys depends on their order, gaps included. So where bits matter a node's path must lie side by side, as it
will after it is accepted. Legend: B rows, N nodes, C chains of all rows, D nodes of the longest chain.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sametoken.speculation.draft import depth


class Chains(NamedTuple):
    """Every root-to-leaf path of B trees; nodes above a fork are on several.

    Attributes:
        rows: [C] the tree that each chain belongs to.
        path: [C, D] its nodes, root first, the last one repeated as padding.
        source: [C * D] which of the B * N nodes each place holds.
        place: [B * N] one place among C * D where each node stands at its own depth.
    """

    rows: Tensor
    path: Tensor
    source: Tensor
    place: Tensor


def is_chain(ancestor_mask: Tensor) -> bool:
    """True if all trees of `ancestor_mask` [B, N, N] are single chains."""
    return torch.equal(depth(ancestor_mask), torch.arange(ancestor_mask.shape[1]).expand(ancestor_mask.shape[:2]))


def chains(ancestor_mask: Tensor) -> Chains:
    """Take trees apart.

    Args:
        ancestor_mask: [B, N, N] `ancestors` of the trees, on the host.
    """
    nodes = ancestor_mask.shape[1]
    rows, leaves = (ancestor_mask.sum(1) == 1).nonzero(as_tuple=True)  # a leaf reaches nobody's path but its own
    on_path = ancestor_mask[rows, leaves]
    lengths = on_path.sum(1, keepdim=True)
    longest = int(lengths.max())
    path = torch.where(on_path, torch.arange(nodes), nodes).sort(dim=1).values[:, :longest].minimum(leaves.unsqueeze(1))
    source = rows.unsqueeze(1) * nodes + path
    real = torch.arange(longest) < lengths
    place = torch.empty(ancestor_mask.shape[0] * nodes, dtype=torch.int64)
    place[source[real]] = real.flatten().nonzero().squeeze(1)
    return Chains(rows, path, source.flatten(), place)
