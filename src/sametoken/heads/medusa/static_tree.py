"""A static tree for Medusa heads from how often each rank of each head is right, the nodes that gain most first.

Heads guess without knowing of each other, so a path is taken to be right as often as the product of its ranks' rates,
as FasterDecoding/Medusa builds its trees.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from sametoken.heads.medusa.module import MedusaHeads
from sametoken.learning.target import OuterLayers

RANKS = 10  # guesses of a head that a tree may hold


def rank_rates(heads: MedusaHeads, outer: OuterLayers, texts: Iterable[tuple[Tensor, Tensor, int]]) -> Tensor:
    """[K, RANKS] how often each rank of each head is the token that the target says.

    Args:
        texts: of each text its tokens [S], the target's last normed states [S, H], and where its answer begins.
    """
    hits = torch.zeros(heads.config.num_heads, min(RANKS, heads.config.vocab_size), dtype=torch.float64)
    tried = torch.zeros(heads.config.num_heads, 1, dtype=torch.float64)
    with torch.no_grad():
        for tokens, last, start in texts:
            for i, (head, states) in enumerate(zip(heads.each(), heads.states(last), strict=True)):
                first = max(start - 1, 0)  # the feature of the last prompt token is the first that a draft is made from
                wanted = tokens[first + 2 + i :].unsqueeze(1)
                read = states[first : first + len(wanted)]
                scores = read @ outer.head.to(read.dtype).T if head.head is None else head.head(read)
                hits[i] += (scores.topk(hits.shape[1]).indices == wanted).sum(0).cpu()
                tried[i] += len(wanted)
    return hits / tried.clamp(min=1)


def best_tree(rates: Tensor, nodes: int) -> tuple[tuple[int, ...], ...]:
    """The paths of the `nodes` nodes that are right most often, parents before children.

    Args:
        rates: [K, R] from `rank_rates`.
    """
    table: Sequence[Sequence[float]] = rates.tolist()
    waiting: list[tuple[float, tuple[int, ...]]] = [(-rate, (rank,)) for rank, rate in enumerate(table[0])]
    heapq.heapify(waiting)
    found: list[tuple[int, ...]] = []
    while waiting and len(found) < nodes:
        value, path = heapq.heappop(waiting)
        if value == 0:
            break  # what was never right is no guess
        found.append(path)
        if len(path) < len(table):
            for rank, rate in enumerate(table[len(path)]):
                heapq.heappush(waiting, (value * rate, (*path, rank)))
    return tuple(found)
