"""Attention of new tokens over a cache view; the bits of a row's results do not depend on the other rows of the batch.

Query heads that share a key head are folded into query rows, so keys are read once (4-8 times faster than repeating
them). The arithmetic of a query must not depend on the number of queries: spans run in tiles of equal height, the last
one padded. The compiled kernels have their own attention (`model.compiled`); this one runs everywhere.
Legend: T tokens, Hq query heads, Hk key heads, G = Hq / Hk, D head size, B rows, N nodes, L key length.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sametoken.kernels.devices import fused
from sametoken.model.layers import capped
from sametoken.runtime.cache import KVCache, Segment, View

TILE = 16
# From 64 folded rows on, the bfloat16 kernel may repack the keys, which changes its arithmetic.
PACKED_ROWS = 64
SINK_KEYS = 16  # columns before the keys of a layer with sinks, which keep the keys aligned
SCORE_KEYS = 64  # keys of one product of capped scores
BOUND = 1e9  # bound of keys and values in the cache


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cache: KVCache,
    view: View,
    layer: int,
    window: int | None,
    chunked: bool = False,
    sinks: Tensor | None = None,
    scale: float | None = None,
    cap: float | None = None,
) -> Tensor:
    """Store the new keys and values in the cache, then attend.

    Args:
        q: [T, Hq, D] queries after RoPE.
        k, v: [T, Hk, D] keys after RoPE, and values.
        window: sliding window in positions (a token sees itself and window - 1 before it), or None.
        chunked: windows are adjacent chunks, and a token sees its own chunk up to itself; not on CUDA.
        sinks: [Hq] attention sinks: a score without a key in the softmax of each query of a head, or None.
        scale: factor of the products, None for 1 / sqrt(D).
        cap: scores become cap tanh(score / cap), None for no cap.

    Returns:
        [T, Hq * D].
    """
    if not fused(q):  # other rows read these slots too, masked: 0 * NaN would be NaN
        k, v = _bounded(k), _bounded(v)
    cache.write(layer, view.slots, k, v)
    pieces = torch.split(q, [segment.tokens for segment in view.segments]) if len(view.segments) > 1 else (q,)
    outs = [
        _segment(x, cache, s, layer, window, chunked, sinks, scale, cap)
        for x, s in zip(pieces, view.segments, strict=True)
    ]
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _bounded(x: Tensor) -> Tensor:
    """Copy of x without NaN, clamped to a size that no working model reaches."""
    bound = min(BOUND, torch.finfo(x.dtype).max)  # float16 has a smaller maximum
    return x.clamp(-bound, bound).nan_to_num_(nan=0.0)


def _segment(
    q: Tensor, cache: KVCache, segment: Segment, layer: int, window: int | None, chunked: bool,
    sinks: Tensor | None, scale: float | None, cap: float | None,
) -> Tensor:  # fmt: skip
    if fused(q):
        return _paged(q, cache, segment, layer, window, scale, cap)
    keys, values = cache.read(layer, segment)
    batch, nodes, key_heads = segment.batch, segment.nodes, keys.shape[1]
    groups, size = q.shape[1] // key_heads, q.shape[2]
    tile = TILE if q.is_cuda else tile_height(groups, q.dtype)
    tiles = -(-nodes // tile)

    if segment.chains is not None:
        q = q[segment.chains.source]
    q = q.view(batch, nodes, key_heads, groups, size)
    if tiles * tile > nodes:
        q = F.pad(q, (0, 0, 0, 0, 0, 0, 0, tiles * tile - nodes))
    q = q.view(batch * tiles, tile, key_heads, groups, size).permute(0, 2, 3, 1, 4)
    q = q.reshape(batch * tiles, key_heads, groups * tile, size)
    if tiles > 1:
        keys, values = (_repeat(x, tiles) for x in (keys, values))
    mask = segment.mask(window, chunked, groups, tile)
    if cap is not None:  # the scores are the mask, and the products are zero
        mask, q = mask + _capped_scores(q, keys, scale, cap), torch.zeros_like(q)
    if sinks is not None:
        keys, values = (F.pad(x, (0, 0, SINK_KEYS, 0)) for x in (keys, values))
        mask = _with_sinks(mask, sinks.view(key_heads, groups), tile)
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale)
    out = out.view(batch * tiles, key_heads, groups, tile, size).permute(0, 3, 1, 2, 4)
    out = out.reshape(batch, tiles * tile, -1)[:, :nodes].reshape(batch * nodes, -1)
    return out if segment.chains is None else out[segment.chains.place]


def _capped_scores(q: Tensor, keys: Tensor, scale: float | None, cap: float) -> Tensor:
    """Scores [B, Hk, N', L] of queries [B, Hk, N', D] and keys [B, Hk, L, D], in products of one shape."""
    rows, heads, length, size = keys.shape
    parts = keys.reshape(rows * heads, length // SCORE_KEYS, SCORE_KEYS, size).transpose(2, 3)
    scores = torch.matmul(q.reshape(rows * heads, 1, -1, size), parts) * (size**-0.5 if scale is None else scale)
    flat = capped(scores.transpose(1, 2).reshape(-1, length), cap)
    return flat.view(rows, heads, -1, length)


def _with_sinks(mask: Tensor, sinks: Tensor, tile: int) -> Tensor:
    """Mask with columns in front for keys of zeros: the last one has the sink scores [Hk, G], the others -inf."""
    before = mask.new_full((mask.shape[0], *sinks.shape, tile, SINK_KEYS), float("-inf"))
    before[..., -1] = sinks.to(mask.dtype).unsqueeze(-1)
    before = before.view(mask.shape[0], sinks.shape[0], -1, SINK_KEYS)
    return torch.cat([before, mask.expand(-1, sinks.shape[0], -1, -1)], -1)


def _paged(
    q: Tensor, cache: KVCache, segment: Segment, layer: int, window: int | None, scale: float | None, cap: float | None
) -> Tensor:
    """Attend on CUDA, with a kernel that reads the page table and gives a tree's nodes the bits of plain decoding."""
    from sametoken.kernels.triton.attention import TreeTiles, paged_attention

    group = q.shape[1] // cache.keys.shape[2]
    if group not in segment.trees:
        span, table = segment.span, cache.table
        segment.trees[group] = TreeTiles.of(
            span.rows, span.starts, span.ancestor_mask, span.nodes, table.table, table.page_size, segment.length, group
        )
    scales = None
    if cache.key_scales is not None and cache.value_scales is not None:
        scales = cache.key_scales[layer], cache.value_scales[layer]
    stored = cache.keys[layer], cache.values[layer]
    return paged_attention(q, *stored, segment.trees[group], window, scales, scale, cap)


def _repeat(x: Tensor, tiles: int) -> Tensor:
    """Repeat [B, ...] to [B * tiles, ...]; one row is not copied."""
    return x.repeat_interleave(tiles, 0) if x.shape[0] > 1 else x.expand(tiles, -1, -1, -1)


def tile_height(groups: int, dtype: torch.dtype) -> int:
    """Number of nodes of a tile, padding nodes included."""
    return TILE if dtype == torch.float32 else max(1, min(TILE, (PACKED_ROWS - 1) // groups))
