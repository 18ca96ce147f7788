"""Static trees for Medusa heads, from the rate at which each rank of each head is correct, best nodes first.

Heads guess independently, so the rate of a path is estimated as the product of its ranks' rates, as
FasterDecoding/Medusa does.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from sametoken.heads.medusa.module import MedusaHeads
from sametoken.learning.target import OuterLayers

RANKS = 10  # guesses of a head in a tree


def rank_rates(heads: MedusaHeads, outer: OuterLayers, texts: Iterable[tuple[Tensor, Tensor, int]]) -> Tensor:
    """Rate [K, RANKS] at which each rank of each head is the token of the texts.

    Args:
        texts: for each text, tokens [S], the target's last normed states [S, H], and the start of the answer.
    """
    hits = torch.zeros(heads.config.num_heads, min(RANKS, heads.config.vocab_size), dtype=torch.float64)
    tried = torch.zeros(heads.config.num_heads, 1, dtype=torch.float64)
    with torch.no_grad():
        for tokens, last, start in texts:
            for i, (head, states) in enumerate(zip(heads.each(), heads.states(last), strict=True)):
                first = max(start - 1, 0)  # the first draft is made from the feature of the last prompt token
                wanted = tokens[first + 2 + i :].unsqueeze(1)
                read = states[first : first + len(wanted)]
                scores = read @ outer.head.to(read.dtype).T if head.head is None else head.head(read)
                hits[i] += (scores.topk(hits.shape[1]).indices == wanted).sum(0).cpu()
                tried[i] += len(wanted)
    return hits / tried.clamp(min=1)


def best_tree(rates: Tensor, nodes: int) -> tuple[tuple[int, ...], ...]:
    """Paths of the `nodes` nodes with the highest rates, parents before children.

    Args:
        rates: [K, R] result of `rank_rates`.
    """
    table: Sequence[Sequence[float]] = rates.tolist()
    waiting: list[tuple[float, tuple[int, ...]]] = [(-rate, (rank,)) for rank, rate in enumerate(table[0])]
    heapq.heapify(waiting)
    found: list[tuple[int, ...]] = []
    while waiting and len(found) < nodes:
        value, path = heapq.heappop(waiting)
        if value == 0:
            break  # nodes with rate 0 are left out
        found.append(path)
        if len(path) < len(table):
            for rank, rate in enumerate(table[len(path)]):
                heapq.heappush(waiting, (value * rate, (*path, rank)))
    return tuple(found)
