"""Root-to-leaf chains of draft trees, a form in which attention gives a node the same bits as plain decoding.

The bits of a sum over keys depend on their order and on gaps, so the nodes of a path must be adjacent, as they are
after acceptance. Legend: B rows, N nodes, C chains of all rows, D nodes of the longest chain.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sametoken.speculation.draft import depth


class Chains(NamedTuple):
    """All root-to-leaf paths of B trees; nodes above a fork are on several.

    Attributes:
        rows: [C] tree of each chain.
        path: [C, D] nodes of each chain, root first, the last one repeated as padding.
        source: [C * D] node, of B * N, at each place.
        place: [B * N] one place, of C * D, that holds each node at its own depth.
    """

    rows: Tensor
    path: Tensor
    source: Tensor
    place: Tensor


def is_chain(ancestor_mask: Tensor) -> bool:
    """True if all trees of `ancestor_mask` [B, N, N] are single chains."""
    return torch.equal(depth(ancestor_mask), torch.arange(ancestor_mask.shape[1]).expand(ancestor_mask.shape[:2]))


def chains(ancestor_mask: Tensor) -> Chains:
    """Split trees into chains.

    Args:
        ancestor_mask: [B, N, N] `ancestors` of the trees, on the host.
    """
    nodes = ancestor_mask.shape[1]
    rows, leaves = (ancestor_mask.sum(1) == 1).nonzero(as_tuple=True)  # a leaf is only on its own path
    on_path = ancestor_mask[rows, leaves]
    lengths = on_path.sum(1, keepdim=True)
    longest = int(lengths.max())
    path = torch.where(on_path, torch.arange(nodes), nodes).sort(dim=1).values[:, :longest].minimum(leaves.unsqueeze(1))
    source = rows.unsqueeze(1) * nodes + path
    real = torch.arange(longest) < lengths
    place = torch.empty(ancestor_mask.shape[0] * nodes, dtype=torch.int64)
    place[source[real]] = real.flatten().nonzero().squeeze(1)
    return Chains(rows, path, source.flatten(), place)
