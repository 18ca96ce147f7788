"""Attention of an unrolled head: slots stay, tokens move on; a step sees the first step's keys and its own path's.

At step k the query of slot i sees the keys of step 0 at slots j <= i of its document, and the keys that steps 1 .. k
wrote for slot i. The first are a causal product in tiles, the others one score per step; both are merged by their
log-sum-exp, so neither time nor memory grows with keys times steps. Legend: T slots of all documents, Hq query heads,
Hk key heads, G = Hq / Hk, D head size.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

TILE = 256  # queries of one product: memory is tiles by keys


class UnrolledAttention:
    """`Attend` for the steps of one unrolled forward: every layer is called once per step, steps in order.

    Args:
        lengths: slots of each document; they lie side by side and do not see each other.

    Attributes:
        step: which step is running, set by the caller; an earlier one may be run again.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.step = 0
        self._lengths = tuple(lengths)
        self._stored: dict[int, list[Tensor]] = defaultdict(list)  # per layer: keys and values of each step in turn

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int, window: int | None) -> Tensor:
        """[T, Hq * D] from q [T, Hq, D] and k, v [T, Hk, D]; `window` tokens are seen, the query's own included."""
        stored = self._stored[layer]
        stored[2 * self.step :] = [k, v]
        # The query has moved `step` tokens past its slot, and so has the window over the first step's keys.
        reach = None if window is None else window - self.step
        first, moved = stored[:2], stored[2:]
        if window is not None:
            moved = moved[-2 * window :]
        mixed: Tensor = _Attention.apply(self._lengths, reach, q, *first, *moved)  # type: ignore[no-untyped-call]
        return mixed.reshape(q.shape[0], -1)


class Tile(NamedTuple):
    """Queries of one document that are computed together, and the keys that they may see."""

    queries: slice
    keys: slice


def tiles(lengths: Sequence[int], reach: int | None) -> Iterator[Tile]:
    """Tiles that cover every query; keys that no query of a tile sees are left out."""
    start = 0
    for length in lengths:
        for first in range(0, length, TILE):
            end = min(first + TILE, length)
            oldest = 0 if reach is None else max(0, first - reach + 1)
            yield Tile(slice(start + first, start + end), slice(start + oldest, start + end))
        start += length


class _Attention(torch.autograd.Function):
    """Merged attention with its gradient in closed form; keeps queries, keys, values and one number per query."""

    @staticmethod
    def forward(
        ctx: Any, lengths: tuple[int, ...], reach: int | None, q: Tensor, k: Tensor, v: Tensor, *moved: Tensor
    ) -> Tensor:
        grouped, keys, values = _by_head(q, k.shape[1]), k.transpose(0, 1), v.transpose(0, 1)
        output, lse = _prefix(grouped, keys, values, lengths, reach)
        if moved:
            scores = _path_scores(grouped, moved[0::2])
            total = torch.logaddexp(lse, torch.logsumexp(scores, dim=0))
            output *= (lse - total).exp_().unsqueeze(-1)
            for weight, value in zip((scores - total).exp_(), moved[1::2], strict=True):
                output.addcmul_(weight.unsqueeze(-1), value.transpose(0, 1).unsqueeze(2))
            lse = total
        output = output.to(q.dtype)
        ctx.save_for_backward(grouped, keys, values, output, lse, *moved)
        ctx.lengths, ctx.reach = lengths, reach
        return _by_slot(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        grouped, keys, values, output, lse, *moved = ctx.saved_tensors
        upstream = _by_head(gradients[0].view(gradients[0].shape[0], -1, keys.shape[2]), keys.shape[0])
        inner = (upstream * output).sum(-1, dtype=lse.dtype)  # what softmax subtracts from every score's gradient
        dq, dk, dv = _prefix_backward((grouped, keys, values), upstream, (lse, inner), ctx.lengths, ctx.reach)
        path: list[Tensor] = []
        scale = 1 / math.sqrt(keys.shape[2])
        for key, value, score in zip(moved[0::2], moved[1::2], _path_scores(grouped, moved[0::2]), strict=True):
            k_s, v_s = key.transpose(0, 1).unsqueeze(2), value.transpose(0, 1).unsqueeze(2)
            weight = (score - lse).exp_().unsqueeze(-1)
            change = ((upstream * v_s).sum(-1, keepdim=True, dtype=lse.dtype) - inner.unsqueeze(-1)) * weight * scale
            dq.addcmul_(change, k_s)
            path += [(change * grouped).sum(2).transpose(0, 1), (weight * upstream).sum(2).transpose(0, 1)]
        found = (_by_slot(dq), dk.transpose(0, 1), dv.transpose(0, 1), *path)
        return None, None, *(gradient.to(grouped.dtype) for gradient in found)


def _by_head(q: Tensor, kv_heads: int) -> Tensor:  # [T, Hq, D] -> [Hk, T, G, D], contiguous
    return q.reshape(q.shape[0], kv_heads, -1, q.shape[-1]).transpose(0, 1).contiguous()


def _by_slot(grouped: Tensor) -> Tensor:  # [Hk, T, G, D] -> [T, Hq, D]
    return grouped.transpose(0, 1).flatten(1, 2)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What sums over keys are held in."""
    return torch.promote_types(dtype, torch.float32)


def _path_scores(grouped: Tensor, keys: Sequence[Tensor]) -> Tensor:
    """[steps, Hk, T, G] of every query with the keys of its own path."""
    scores = torch.empty(len(keys), *grouped.shape[:-1], dtype=_wide(grouped.dtype), device=grouped.device)
    for score, key in zip(scores, keys, strict=True):
        torch.sum(grouped * key.transpose(0, 1).unsqueeze(2), -1, dtype=score.dtype, out=score)
    return scores.mul_(1 / math.sqrt(grouped.shape[-1]))


def _prefix(
    grouped: Tensor, keys: Tensor, values: Tensor, lengths: Sequence[int], reach: int | None
) -> tuple[Tensor, Tensor]:
    """Causal attention to the first step's keys alone: [Hk, T, G, D] and log-sum-exp [Hk, T, G]."""
    wide = _wide(grouped.dtype)
    output = torch.zeros(grouped.shape, dtype=wide, device=grouped.device)
    lse = torch.full(grouped.shape[:-1], -math.inf, dtype=wide, device=grouped.device)
    if reach is not None and reach < 1:
        return output, lse
    for tile in tiles(lengths, reach):
        scores = _scores(grouped, keys, tile, reach)
        top = scores.amax(-1, keepdim=True)
        total = scores.sub_(top).exp_().sum(-1, keepdim=True)
        mixed = torch.bmm(scores.to(values.dtype), values[:, tile.keys]).to(wide).div_(total)
        output[:, tile.queries] = mixed.view_as(output[:, tile.queries])
        lse[:, tile.queries] = total.log_().add_(top).view_as(lse[:, tile.queries])
    return output, lse


def _prefix_backward(
    inputs: tuple[Tensor, Tensor, Tensor], upstream: Tensor, sums: tuple[Tensor, Tensor],
    lengths: Sequence[int], reach: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of queries, keys and values through the prefix, given the merged log-sum-exp."""
    grouped, keys, values = inputs
    lse, inner = sums
    wide, scale = _wide(grouped.dtype), 1 / math.sqrt(grouped.shape[-1])
    dq, dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in inputs)
    if reach is not None and reach < 1:
        return dq, dk, dv
    heads, size = keys.shape[0], keys.shape[2]
    for tile in tiles(lengths, reach):
        query, above = (x[:, tile.queries].reshape(heads, -1, size) for x in (grouped, upstream))
        weights = _scores(grouped, keys, tile, reach).sub_(lse[:, tile.queries].reshape(heads, -1, 1)).exp_()
        change = torch.bmm(above, values[:, tile.keys].transpose(1, 2)).to(wide)
        change.sub_(inner[:, tile.queries].reshape(heads, -1, 1)).mul_(weights).mul_(scale)
        weights, change = weights.to(grouped.dtype), change.to(grouped.dtype)
        dv[:, tile.keys] += torch.bmm(weights.transpose(1, 2), above)
        dk[:, tile.keys] += torch.bmm(change.transpose(1, 2), query)
        dq[:, tile.queries] = torch.bmm(change, keys[:, tile.keys]).view_as(dq[:, tile.queries]).to(wide)
    return dq, dk, dv


def _scores(grouped: Tensor, keys: Tensor, tile: Tile, reach: int | None) -> Tensor:
    """[Hk, n * G, keys] of a tile's queries, minus infinity where a query does not see a key."""
    heads, groups, size = keys.shape[0], grouped.shape[2], keys.shape[2]
    query = grouped[:, tile.queries].reshape(heads, -1, size)
    scores = torch.bmm(query, keys[:, tile.keys].transpose(1, 2)).to(_wide(grouped.dtype)).mul_(1 / math.sqrt(size))
    count = tile.queries.stop - tile.queries.start
    # Only the tile's own keys may lie ahead of a query.
    own = scores[:, :, scores.shape[2] - count :]
    own += _ahead(groups, scores.dtype, scores.device)[: count * groups, :count]
    if reach is not None:
        at, seen = (torch.arange(part.start, part.stop, device=scores.device) for part in tile)
        behind = (at.unsqueeze(1) - seen.unsqueeze(0) >= reach).repeat_interleave(groups, dim=0)
        scores.masked_fill_(behind, -math.inf)
    return scores


@lru_cache(maxsize=8)
def _ahead(groups: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[TILE * G, TILE] minus infinity above the diagonal, the query groups of a slot side by side."""
    mask = torch.full((TILE, TILE), -math.inf, dtype=dtype, device=device).triu(1)
    return mask.repeat_interleave(groups, dim=0)
