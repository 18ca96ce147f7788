"""Attention over paged keys and draft trees for CUDA, in Triton, with the bits of plain decoding for every token.

A query reads the keys of its own path in the order of their depth, as they will be stored once accepted, in blocks of
BLOCK keys, chunks of CHUNK and tiles of one height, independently of the batch. Work for other queries only adds exact
zeros. Importing this module needs triton; with TRITON_INTERPRET=1 it runs on the CPU.
Legend: B rows, N query nodes, M tree nodes, G = Hq / Hk, D head size, P page size, C chunks.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.speculation.draft import depth

BLOCK = 64  # keys of one product
CHUNK = 256  # keys that one program reads; partial results are merged in the order of chunks
TILE_ROWS = 16  # height of a product: the least of a tensor core, so that one node costs as much as a few
# A kernel specialised for one of these being 1 or a multiple of 16 could order its arithmetic differently.
SIZES = ["nodes", "tree", "tiles", "row_pages", "chunks", "q_stride", "slots"]
CODES = {torch.int8: 1, torch.uint8: 2}  # by a cache's dtype: int8, or bytes of float8_e4m3fn; 0 for none
WORKSPACE = 32 * 2**20  # bytes of partial results; wide prompts are processed in slabs of nodes


def launch(dtype: torch.dtype, padded: int, codes: int) -> dict[str, int]:
    """Warps and stages of `_chunk` with which 16-bit models spill no register on sm_90 (`tests/triton_compile.py`).

    Args:
        padded: head size, rounded up to a power of two.
        codes: a value of `CODES`.
    """
    wide = padded * (2 if codes else 1) > 128 or dtype == torch.float32
    return {"num_warps": 8, "num_stages": 1} if wide else {"num_warps": 4, "num_stages": 3}


class TreeTiles(NamedTuple):
    """Span in the form that the kernel reads, computed once for all layers.

    Attributes:
        rows: [B] int64 row of the page table.
        starts: [B] int64 committed length.
        depths: [B, N] int64 depth of each query node; its position is `starts + depths`.
        paths: [B, N, M] int64 node at each depth of a query's path, the last one repeated.
        straight: [B, tiles] int32, 1 if all paths of a tile of queries are prefixes of its last query's path.
        table: [rows, pages of a row] int64.
        page_size: P.
        keys: upper bound of a row's keys, tree included, known to the host.
    """

    rows: Tensor
    starts: Tensor
    depths: Tensor
    paths: Tensor
    straight: Tensor
    table: Tensor
    page_size: int
    keys: int

    @classmethod
    def of(
        cls,
        rows: Tensor,
        starts: Tensor,
        ancestor_mask: Tensor,
        nodes: int,
        table: Tensor,
        page_size: int,
        keys: int,
        group: int,
    ) -> TreeTiles:
        """Tiles of a span with rows, starts and ancestor_mask [B, M, M], whose last `nodes` nodes are queries.

        Args:
            group: G, which determines the number of nodes in a tile.
        """
        own = ancestor_mask[:, -nodes:]
        count = ancestor_mask.shape[1]
        index = torch.arange(count, device=ancestor_mask.device)
        itself = index[-nodes:].unsqueeze(1)
        paths = torch.where(own, index, count).sort(dim=-1).values.minimum(itself)
        depths = depth(own)
        straight = _straight(depths, paths, _height(group) // group)
        return cls(rows, starts, depths, paths, straight, table, page_size, keys)


def _height(group: int) -> int:
    """Rows of a tile: whole nodes, with a row for each query head of a key head."""
    return max(TILE_ROWS, int(triton.next_power_of_2(group)))


@triton.jit
def _merge(peak, total, out, other_peak, other_total, other):  # type: ignore[no-untyped-def]
    """Merge two softmax accumulators: greatest score, sum of exponentials, weighted values."""
    new = tl.maximum(peak, other_peak)
    base = tl.where(new == float("-inf"), 0.0, new)
    mine, theirs = tl.exp2(peak - base), tl.exp2(other_peak - base)
    return new, total * mine + other_total * theirs, out * mine + other * theirs


@triton.jit  # type: ignore[untyped-decorator]
def _numbers(codes, CODES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert codes to float32; 8-bit codes are exact in each dtype of a model."""
    if CODES == 2:  # not every GPU converts float8
        x = codes.to(tl.int32)
        size = x & 127
        normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        number = tl.where(size < 8, size.to(tl.float32) * (1.0 / 512), normal)
        codes = tl.where(x < 128, number, -number)
    return codes.to(tl.float32)


@triton.jit(do_not_specialize=SIZES)  # type: ignore[untyped-decorator]
def _chunk(  # type: ignore[no-untyped-def]
    q, keys, values, key_scales, value_scales, rows, starts, depths, paths, straight, table, peaks, totals, outs,
    scale, cap, nodes, tree, tiles, row_pages, chunks, q_stride, slots,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    CODES: tl.constexpr,
):  # fmt: skip
    """Attend over one chunk of keys for one tile of query nodes and one key head (one program)."""
    per_tile: tl.constexpr = ROWS // GROUP
    row, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    head, chunk = tl.program_id(1), tl.program_id(2)
    start = tl.load(starts + row)
    table += tl.load(rows + row) * row_pages
    place = tl.arange(0, ROWS)
    member = place // GROUP
    node = tile * per_tile + member
    real = (member < per_tile) & (node < nodes)
    token = row * nodes + node
    # Padding queries have position -1 and see nothing.
    position = tl.where(real, start + tl.load(depths + token, mask=real, other=0), -1)
    lanes = tl.arange(0, PADDED)
    query_head = head * GROUP + place % GROUP
    at = (token * q_stride + query_head * SIZE)[:, None] + lanes[None, :]
    x = tl.load(q + at, mask=real[:, None] & (lanes < SIZE)[None, :], other=0.0)

    least = chunk * CHUNK
    if WINDOW > 0:
        least = tl.maximum(least, start - WINDOW + 1)
    end = tl.minimum((chunk + 1) * CHUNK, tl.max(position, 0) + 1)
    first, last = least // BLOCK, tl.cdiv(end, BLOCK)
    # Blocks shared by all queries: the committed ones, and all blocks if the paths are one path.
    common = tl.load(straight + tl.program_id(0))
    shared = tl.where(common > 0, last, tl.minimum(tl.maximum(start // BLOCK, first), last))
    own_blocks = last - shared
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, PADDED], tl.float32)
    for item in range(tl.maximum(shared - first, 0) + tl.maximum(own_blocks, 0) * per_tile):
        beyond = item - (shared - first)
        alone = beyond >= 0
        reader = tl.where(alone, beyond // tl.maximum(own_blocks, 1), per_tile - 1)
        block = tl.where(alone, shared + beyond % tl.maximum(own_blocks, 1), first + item)
        index = block * BLOCK + tl.arange(0, BLOCK)
        source = row * nodes + tl.minimum(tile * per_tile + reader, nodes - 1)
        step = index - start
        on_path = tl.load(paths + source * tree + step, mask=(step >= 0) & (step < tree), other=0)
        lies = tl.where(step >= 0, start + on_path, index)
        inside = index < end
        page = tl.load(table + tl.minimum(lies // PAGE, row_pages - 1), mask=inside, other=0)
        slot = page * PAGE + lies % PAGE
        from_ = (slot * KV_HEADS + head) * SIZE
        k = tl.load(keys + from_[None, :] + lanes[:, None], mask=inside[None, :] & (lanes < SIZE)[:, None], other=0)
        v = tl.load(values + from_[:, None] + lanes[None, :], mask=inside[:, None] & (lanes < SIZE)[None, :], other=0)
        if CODES > 0:
            of_head = slot + head.to(tl.int64) * slots
            k_scale = tl.load(key_scales + of_head, mask=inside, other=0.0)
            v_scale = tl.load(value_scales + of_head, mask=inside, other=0.0)
            k = _numbers(k, CODES)
            v = _numbers(v, CODES) * v_scale[:, None]
        # A draft's value that is not finite must not reach others in the tile, whose weight for it is 0.
        v = tl.where(tl.abs(v.to(tl.float32)) < float("inf"), v, 0.0)
        k, v = k.to(x.dtype), v.to(x.dtype)
        scores = tl.dot(x, k, input_precision="ieee") * scale
        if CODES > 0:
            scores *= k_scale[None, :]
        if CAPPED:  # tanh(y) = 1 - 2 / (exp(2 y) + 1)
            scores = cap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
        visible = (index[None, :] <= position[:, None]) & ((member == reader) | (not alone))[:, None]
        if WINDOW > 0:
            visible = visible & (position[:, None] - index[None, :] < WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        new = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(peak - base)
        total = total * fade + tl.sum(weights, 1)
        out = out * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        peak = new
    if end > chunk * CHUNK:  # otherwise never read
        to = (token * KV_HEADS * GROUP + query_head) * chunks + chunk
        tl.store(peaks + to, peak, mask=real)
        tl.store(totals + to, total, mask=real)
        tl.store(outs + to[:, None] * SIZE + lanes[None, :], out, mask=real[:, None] & (lanes < SIZE)[None, :])


@triton.jit(do_not_specialize=["nodes", "chunks"])  # type: ignore[untyped-decorator]
def _join(  # type: ignore[no-untyped-def]
    peaks, totals, outs, starts, depths, result, nodes, chunks,
    HEADS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Merge the chunks of one query in order; their number depends on this query alone."""
    token, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(starts + token // nodes) + tl.load(depths + token)
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0) // CHUNK
    lanes = tl.arange(0, PADDED)
    # A vector of equal numbers, so that scalar and vector arithmetic never mix.
    peak = tl.full([PADDED], float("-inf"), tl.float32)
    total = tl.zeros([PADDED], tl.float32)
    out = tl.zeros([PADDED], tl.float32)
    for chunk in range(first, position // CHUNK + 1):
        at = (token * HEADS + head) * chunks + chunk
        other = tl.load(outs + at * SIZE + lanes, mask=lanes < SIZE, other=0.0)
        other_peak, other_total = tl.load(peaks + at + lanes * 0), tl.load(totals + at + lanes * 0)
        peak, total, out = _merge(peak, total, out, other_peak, other_total, other)
    tl.store(result + (token * HEADS + head) * SIZE + lanes, tl.div_rn(out, total), mask=lanes < SIZE)


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tree: TreeTiles,
    window: int | None,
    scales: tuple[Tensor, Tensor] | None = None,
    scale: float | None = None,
    cap: float | None = None,
) -> Tensor:
    """Attend over the query nodes of B trees whose keys and values are already in the cache.

    Args:
        q: [B * N, Hq, D] queries after RoPE; the heads of a token are contiguous, tokens may be strided.
        keys, values: [slots, Hk, D] of one layer, contiguous: numbers, or codes of `runtime.kv_format`.
        tree: places of queries and keys.
        window: sliding window in positions, or None.
        scales: scales [slots, Hk] float32 of coded keys and of coded values, the slots of a head contiguous.
        scale: factor of the products, None for 1 / sqrt(D).
        cap: scores become cap tanh(score / cap), None for no cap.

    Returns:
        [B * N, Hq * D].
    """
    base = math.log2(math.e)  # scores are exponents of 2
    scale = base / math.sqrt(q.shape[2]) if scale is None else base * scale
    stored = [keys, values, *(scales or ())]
    out: Tensor = _operator(q, stored, [*tree[:6]], [tree.page_size, tree.keys, window or 0], scale, cap or 0.0)
    return out


@torch.library.custom_op("sametoken::paged_attention", mutates_args=())
def _operator(
    q: Tensor, stored: list[Tensor], tree: list[Tensor], sizes: list[int], scale: float, cap: float
) -> Tensor:
    rows, starts, depths, paths, straight, table = tree
    batch, nodes = depths.shape
    group = q.shape[1] // stored[0].shape[1]
    per_tile, chunks = _height(group) // group, -(-sizes[1] // CHUNK)
    # Slabs are whole tiles; the partial results of one tile always fit.
    slab = max(1, WORKSPACE // (4 * batch * q.shape[1] * chunks * (q.shape[2] + 2) * per_tile)) * per_tile
    q = q.view(batch, nodes, *q.shape[1:])
    outs = []
    for begin in range(0, nodes, slab):
        part, tiles = slice(begin, begin + slab), slice(begin // per_tile, (begin + slab) // per_tile)
        queries = [x[:, at].contiguous() for x, at in ((depths, part), (paths, part), (straight, tiles))]
        queries.insert(0, q if slab >= nodes else q[:, part].contiguous())
        with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
            where = [rows, starts, table]
            outs.append(_slab(queries, stored, where, (sizes[0], chunks, sizes[2]), scale, cap))
    return outs[0].flatten(0, 1) if len(outs) == 1 else torch.cat(outs, dim=1).flatten(0, 1)


@_operator.register_fake
def _(q: Tensor, stored: list[Tensor], tree: list[Tensor], sizes: list[int], scale: float, cap: float) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1] * q.shape[2])


def _slab(
    queries: list[Tensor], stored: list[Tensor], where: list[Tensor], sizes: tuple[int, int, int], scale: float,
    cap: float,
) -> Tensor:  # fmt: skip
    """Result [B, N, Hq * D] for some of the nodes."""
    (q, depths, paths, straight), (rows, starts, table), (page_size, chunks, window) = queries, where, sizes
    batch, nodes, heads, size = q.shape
    kv_heads, tiles = stored[0].shape[1], straight.shape[1]
    group, padded = heads // kv_heads, max(16, triton.next_power_of_2(size))
    partial = [q.new_empty(batch, nodes, heads, chunks, *shape, dtype=torch.float32) for shape in ((), (), (size,))]
    codes = CODES.get(stored[0].dtype, 0)
    scales = stored[2:] or stored  # not read for unquantised caches
    _chunk[(batch * tiles, kv_heads, chunks)](
        q, *stored[:2], *scales, rows, starts, depths, paths, straight, table, *partial,
        2 * scale / cap if cap else scale, math.log2(math.e) * cap,
        # Not stride(1), which torch sets freely for a single node.
        nodes, paths.shape[2], tiles, table.shape[1], chunks, q.stride(0) // nodes,
        stored[0].shape[0],
        KV_HEADS=kv_heads, GROUP=group, SIZE=size, PADDED=padded, PAGE=page_size,
        WINDOW=window, CAPPED=cap > 0, ROWS=_height(group), BLOCK=BLOCK, CHUNK=CHUNK, CODES=codes,
        enable_fp_fusion=False, **launch(q.dtype, padded, codes),
    )  # fmt: skip
    result = q.new_empty(q.shape)
    _join[(batch * nodes, heads)](
        *partial, starts, depths, result, nodes, chunks,
        HEADS=heads, SIZE=size, PADDED=padded, WINDOW=window, CHUNK=CHUNK, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return result.flatten(2)


def _straight(depths: Tensor, paths: Tensor, per_tile: int) -> Tensor:
    """[B, tiles] int32, 1 if all paths of a tile are prefixes of its last node's path."""
    batch, nodes, count = paths.shape
    tiles = -(-nodes // per_tile)
    index = torch.arange(nodes, device=paths.device)
    last = (index // per_tile * per_tile + per_tile - 1).clamp(max=nodes - 1)
    beyond = torch.arange(count, device=paths.device) > depths.unsqueeze(2)
    deepest = (depths[:, last] >= depths) & ((paths == paths[:, last]) | beyond).all(-1)
    padded = deepest.new_ones(batch, tiles * per_tile)
    padded[:, :nodes] = deepest
    return padded.view(batch, tiles, per_tile).all(-1).to(torch.int32)
