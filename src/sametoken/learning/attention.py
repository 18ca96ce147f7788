"""Attention of an unrolled head, where a query sees the keys of the first step and those of its own path.

At step k, the query of slot i sees the keys of step 0 at slots j <= i of its document (a causal product in tiles), and
the keys of steps 1 .. k at slot i (one score per step). Both are merged by their log-sum-exp, so neither time nor
memory grows with keys times steps. Legend: T slots of all documents, Hq query heads, Hk key heads, G = Hq / Hk, D head
size.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

QUERY_TILE = 256  # queries of one document in a product; memory is tiles times keys
ROWS = 1024  # queries of short documents in a product


class UnrolledAttention:
    """`Attend` for the steps of one unrolled forward; every layer is called once per step, steps in order.

    Args:
        lengths: number of slots of each document; documents are concatenated and do not see each other.
        scale: factor of the products of queries and keys, None for 1 / sqrt(D).

    Attributes:
        step: number of the running step, set by the caller; an earlier one may be run again.
    """

    def __init__(self, lengths: Sequence[int], scale: float | None = None) -> None:
        self.step, self._scale = 0, scale
        self._lengths = tuple(lengths)
        self._tiles: dict[int | None, list[Tile]] = {}  # by window
        self._stored: dict[int, list[Tensor]] = defaultdict(list)  # per layer: keys and values of each step in turn

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int, window: int | None) -> Tensor:
        """Result [T, Hq * D] from q [T, Hq, D] and k, v [T, Hk, D]; `window` includes the query's own token."""
        if self._scale is not None:
            q = q * (self._scale * math.sqrt(q.shape[2]))
        stored = self._stored[layer]
        stored[2 * self.step :] = [k, v]
        # The query's token is `step` tokens past its slot, so the window over the first step's keys moves with it.
        width = None if window is None else window - self.step
        first, moved = stored[:2], stored[2:]
        if window is not None:
            moved = moved[-2 * window :]
        if window not in self._tiles:
            self._tiles[window] = tiles(self._lengths, window, q.device)
        mixed: Tensor = _Attention.apply(self._tiles[window], width, q, *first, *moved)  # type: ignore[no-untyped-call]
        return mixed.reshape(q.shape[0], -1)


class Tile(NamedTuple):
    """Queries that are computed together: n segments of documents with Q queries each, padded to the longest.

    Attributes:
        queries: int64 [n * Q] slots of the queries.
        keys: int64 [n * L] slots of visible keys, those of the queries last.
        stretches: n, number of segments.
        kept: [m] indices of queries that are not padding.
        padding: indices of queries that are padding.
    """

    queries: Tensor
    keys: Tensor
    stretches: int
    kept: Tensor
    padding: Tensor


def tiles(lengths: Sequence[int], window: int | None, device: torch.device) -> list[Tile]:
    """Tiles that contain every query once, without keys that no query of the tile sees."""
    starts = [0, *accumulate(lengths)]
    short = sorted((i for i, length in enumerate(lengths) if length <= QUERY_TILE), key=lambda i: (lengths[i], i))
    found = []
    for group in _alike(short, lengths):
        longest = lengths[group[-1]]
        places = torch.arange(longest).expand(len(group), -1)
        counts = torch.tensor([lengths[i] for i in group]).unsqueeze(1)
        slots = torch.tensor([starts[i] for i in group]).unsqueeze(1) + places.minimum(counts - 1)
        real, flat = (places < counts).flatten(), slots.flatten()
        found.append(Tile(flat, flat, len(group), real.nonzero()[:, 0], (~real).nonzero()[:, 0]))
    for start, length in zip(starts, lengths, strict=False):
        for first in range(0, length if length > QUERY_TILE else 0, QUERY_TILE):
            end = min(first + QUERY_TILE, length)
            oldest = 0 if window is None else max(0, first - window + 1)
            queries, keys = torch.arange(start + first, start + end), torch.arange(start + oldest, start + end)
            found.append(Tile(queries, keys, 1, torch.arange(end - first), torch.empty(0, dtype=torch.int64)))
    moved = [[part.to(device) for part in (each.queries, each.keys, each.kept, each.padding)] for each in found]
    return [Tile(a, b, each.stretches, c, d) for each, (a, b, c, d) in zip(found, moved, strict=True)]


def _alike(documents: Sequence[int], lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield groups of documents by ascending length that need little padding and fit into a few tiles."""
    group: list[int] = []
    for document in documents:
        length = lengths[document]
        if group and (length * (len(group) + 1) > ROWS or length > 1.25 * lengths[group[0]] + 4):
            yield group
            group = []
        group.append(document)
    if group:
        yield group


class _Attention(torch.autograd.Function):
    """Merged attention with its gradient in closed form; saves queries, keys, values and one number per query."""

    @staticmethod
    def forward(
        ctx: Any, parts: Sequence[Tile], width: int | None, q: Tensor, k: Tensor, v: Tensor, *moved: Tensor
    ) -> Tensor:
        grouped, keys, values = _by_head(q, k.shape[1]), k.transpose(0, 1), v.transpose(0, 1)
        output, lse = _prefix(grouped, keys, values, parts, width)
        if moved:
            scores = _path_scores(grouped, moved[0::2])
            total = torch.logaddexp(lse, torch.logsumexp(scores, dim=0))
            output *= (lse - total).exp_().unsqueeze(-1)
            for weight, value in zip((scores - total).exp_(), moved[1::2], strict=True):
                output.addcmul_(weight.unsqueeze(-1), value.transpose(0, 1).unsqueeze(2))
            lse = total
        output = output.to(q.dtype)
        ctx.save_for_backward(grouped, keys, values, output, lse, *moved)
        ctx.parts, ctx.width = parts, width
        return _by_slot(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        grouped, keys, values, output, lse, *moved = ctx.saved_tensors
        upstream = _by_head(gradients[0].view(gradients[0].shape[0], -1, keys.shape[2]), keys.shape[0])
        inner = (upstream * output).sum(-1, dtype=lse.dtype)  # subtracted from the gradient of every score by softmax
        dq, dk, dv = _prefix_backward((grouped, keys, values), upstream, (lse, inner), ctx.parts, ctx.width)
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
    """Dtype of sums over keys."""
    return torch.promote_types(dtype, torch.float32)


def _path_scores(grouped: Tensor, keys: Sequence[Tensor]) -> Tensor:
    """Scores [steps, Hk, T, G] of every query with the keys of its own path."""
    scores = torch.empty(len(keys), *grouped.shape[:-1], dtype=_wide(grouped.dtype), device=grouped.device)
    for score, key in zip(scores, keys, strict=True):
        torch.sum(grouped * key.transpose(0, 1).unsqueeze(2), -1, dtype=score.dtype, out=score)
    return scores.mul_(1 / math.sqrt(grouped.shape[-1]))


def _prefix(
    grouped: Tensor, keys: Tensor, values: Tensor, parts: Sequence[Tile], width: int | None
) -> tuple[Tensor, Tensor]:
    """Causal attention over the first step's keys alone: result [Hk, T, G, D] and log-sum-exp [Hk, T, G]."""
    wide = _wide(grouped.dtype)
    output = torch.zeros(grouped.shape, dtype=wide, device=grouped.device)
    lse = torch.full(grouped.shape[:-1], -math.inf, dtype=wide, device=grouped.device)
    if width is not None and width < 1:
        return output, lse
    for tile in parts:
        scores = _scores(grouped, keys, tile, width)
        top = scores.amax(-1, keepdim=True)
        total = scores.sub_(top).exp_().sum(-1, keepdim=True)
        mixed = torch.bmm(scores.to(values.dtype), _taken(values, tile.keys, tile, values.shape[2]))
        _put(output, tile, mixed.to(wide).div_(total))
        _put(lse, tile, total.log_().add_(top))
    return output, lse


def _prefix_backward(
    inputs: tuple[Tensor, Tensor, Tensor], upstream: Tensor, sums: tuple[Tensor, Tensor],
    parts: Sequence[Tile], width: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of queries, keys and values from the first step's keys, given the merged log-sum-exp."""
    grouped, keys, values = inputs
    wide, scale = _wide(grouped.dtype), 1 / math.sqrt(grouped.shape[-1])
    dq, dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in inputs)
    if width is not None and width < 1:
        return dq, dk, dv
    heads, size = keys.shape[0], keys.shape[2]
    for tile in parts:
        above = upstream.index_select(1, tile.queries)
        above.index_fill_(1, tile.padding, 0)  # padding has no effect
        above = above.view(heads * tile.stretches, -1, size)
        lse, inner = (_taken(each, tile.queries, tile, 1) for each in sums)
        weights = _scores(grouped, keys, tile, width).sub_(lse).exp_()
        change = torch.bmm(above, _taken(values, tile.keys, tile, size).transpose(1, 2)).to(wide)
        change.sub_(inner).mul_(weights).mul_(scale)
        if len(tile.padding):
            change.view(heads, -1, grouped.shape[2], change.shape[-1]).index_fill_(1, tile.padding, 0)
        weights, change = weights.to(grouped.dtype), change.to(grouped.dtype)
        query = _taken(grouped, tile.queries, tile, size)
        for gradient, by_key, by_query in ((dv, weights, above), (dk, change, query)):
            found = torch.bmm(by_key.transpose(1, 2), by_query)
            gradient.index_add_(1, tile.keys, found.view(heads, -1, size).to(wide))
        _put(dq, tile, torch.bmm(change, _taken(keys, tile.keys, tile, size)).to(wide))
    return dq, dk, dv


def _taken(stored: Tensor, slots: Tensor, tile: Tile, *size: int) -> Tensor:
    """Rows [Hk * n, rows of a segment, *size] of `stored` [Hk, T, ...], with query groups, if any, as rows."""
    return stored.index_select(1, slots).view(stored.shape[0] * tile.stretches, -1, *size)


def _put(stored: Tensor, tile: Tile, found: Tensor) -> None:
    """Write the results of a tile's queries to their slots of `stored` [Hk, T, G, ...]."""
    rows = found.view(stored.shape[0], len(tile.queries), *stored.shape[2:])
    stored.index_copy_(1, tile.queries[tile.kept], rows.index_select(1, tile.kept))


def _scores(grouped: Tensor, keys: Tensor, tile: Tile, width: int | None) -> Tensor:
    """Scores [Hk * n, Q * G, L] of a tile's queries, minus infinity for invisible keys."""
    groups, size = grouped.shape[2], keys.shape[2]
    query, key = _taken(grouped, tile.queries, tile, size), _taken(keys, tile.keys, tile, size)
    scores = torch.bmm(query, key.transpose(1, 2)).to(_wide(grouped.dtype)).mul_(1 / math.sqrt(size))
    count = len(tile.queries) // tile.stretches
    # Only the queries' own keys may be ahead of a query.
    own = scores[:, :, scores.shape[2] - count :]
    own += _ahead(groups, scores.dtype, scores.device)[: count * groups, :count]
    if width is not None:
        at, seen = tile.queries.view(tile.stretches, -1, 1), tile.keys.view(tile.stretches, 1, -1)
        behind = (at - seen >= width).repeat_interleave(groups, dim=1).repeat(keys.shape[0], 1, 1)
        scores.masked_fill_(behind, -math.inf)
    return scores


@lru_cache(maxsize=8)
def _ahead(groups: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Causal mask [TILE * G, TILE] with minus infinity above the diagonal, query groups of a slot adjacent."""
    mask = torch.full((QUERY_TILE, QUERY_TILE), -math.inf, dtype=dtype, device=device).triu(1)
    return mask.repeat_interleave(groups, dim=0)
