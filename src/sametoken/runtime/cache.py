"""Paged KV cache: draft trees are written past a row's committed length; `commit` moves the accepted path up.

Addresses: `slot(row, i) = table[row, i // P] * P + i % P`. Node n of a tree is written at index `start + n`, has
position `start + depth[n]`, and sees the indexes `[0, start)` and its own ancestors. Rejected nodes need no rollback.
Legend: B rows, N nodes, T = sum of B N over spans, L key length, P page size, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from sametoken.kernels.cpu.memory import clear, zeros
from sametoken.runtime.chains import Chains, chains, is_chain
from sametoken.runtime.kv_format import OWN, KVFormat
from sametoken.runtime.transfer import upload
from sametoken.speculation.draft import chain_mask, depth

# For torch's attention, key lengths are padded to whole blocks; otherwise the sum over keys would be split differently
# as a row grows. 512 is the block length of its kernel; shorter blocks change bits on some processors.
KEY_BLOCK = 512
SINK_PAGE = 0


class PageTable:
    """Pages of each row, shared by every cache of an engine (target and draft use the same page numbers).

    Page 0 is a sink without an owner, to which unassigned entries point. Row `spare`, the last, never owns a page and
    receives the writes of batch padding.

    Args:
        short_pages: pages of a second row of each row, for a draft that reads a shorter text. They are fixed and follow
            the pages of the pool; only caches of `all_pages` pages have them. 0 for no such rows.
    """

    def __init__(
        self,
        rows: int,
        pages: int,
        pages_per_row: int,
        page_size: int,
        device: torch.device | str,
        short_pages: int = 0,
    ) -> None:
        self.pages, self.page_size, self.spare, self.short_pages = pages, page_size, rows, short_pages
        self.all_pages, count = pages + rows * short_pages, 1 + (2 * rows if short_pages else rows)
        self.table = torch.zeros(count, pages_per_row, dtype=torch.int64, device=device)
        self._owned: list[list[int]] = [[] for _ in range(count)]
        self._contiguous = [True] * count
        for row in range(rows if short_pages else 0):
            self.extend(self.short(row), range(pages + row * short_pages, pages + (row + 1) * short_pages))

    def short(self, row: int) -> int:
        """Second row of a row, see `short_pages`."""
        return self.spare + 1 + row

    def extend(self, row: int, pages: Sequence[int]) -> None:
        """Append pages to a row."""
        owned = self._owned[row]
        if pages:
            self.table[row, len(owned) : len(owned) + len(pages)] = upload(pages, self.table.device)
        owned.extend(pages)
        self._contiguous[row] = all(b == a + 1 for a, b in pairwise(owned))

    def clear(self, row: int) -> list[int]:
        """Remove a row's pages and return them."""
        owned, self._owned[row] = self._owned[row], []
        self.table[row] = SINK_PAGE
        self._contiguous[row] = True
        return owned

    def owned(self, row: int) -> Sequence[int]:
        return self._owned[row]

    def first_slot(self, row: int, length: int) -> int | None:
        """First of `length` adjacent slots of this row, or None if its slots are not adjacent."""
        owned, pages = self._owned[row], self.pages if row <= self.spare else self.all_pages
        if not owned or not self._contiguous[row] or owned[0] * self.page_size + length > pages * self.page_size:
            return None
        return owned[0] * self.page_size

    def slots(self, rows: Tensor, index: Tensor) -> Tensor:
        """Slots [B, K] of the row indexes `index` [B, K]; indexes past the table map to the sink."""
        page = self.table[rows].gather(1, (index // self.page_size).clamp(max=self.table.shape[1] - 1))
        return page * self.page_size + index % self.page_size


class Span(NamedTuple):
    """A rectangle of new tokens in one forward: the last N of the M nodes of B trees.

    Attributes:
        rows: [B] rows of the page table.
        host_rows: `rows` as Python ints, or () if they must not be read on the host.
        starts: [B] committed length of each row, which is the index of node 0 of its tree.
        ancestor_mask: [B, M, M] `ancestors` of each tree, nodes of earlier forwards included.
        nodes: N, number of the tree's last nodes that this forward computes.
        longest: upper bound of `starts + M`, a host number that sizes the keys.
    """

    rows: Tensor
    host_rows: Sequence[int]
    starts: Tensor
    ancestor_mask: Tensor
    nodes: int
    longest: int

    def with_child(self) -> Span:
        """Span with one more node in each tree, a child of its last node: padding that changes no other node."""
        rows, nodes, _ = self.ancestor_mask.shape
        ancestor_mask = torch.cat([self.ancestor_mask, self.ancestor_mask[:, -1:]], dim=1)
        itself = (torch.arange(nodes + 1, device=ancestor_mask.device) == nodes).view(1, -1, 1).expand(rows, -1, 1)
        ancestor_mask = torch.cat([ancestor_mask, itself], dim=2)
        return self._replace(ancestor_mask=ancestor_mask, nodes=self.nodes + 1, longest=self.longest + 1)


def _index(span: Span) -> Tensor:
    """Indexes [B, M] of the nodes of a span's trees in their rows."""
    return span.starts.unsqueeze(1) + torch.arange(span.ancestor_mask.shape[1], device=span.starts.device)


class Segment:
    """Span in the form that attention computes: B' rows of N' queries, the slots of their keys, and the mask.

    On the host, a branching tree is computed as its separate chains, see `runtime.chains`; otherwise B' and N' are
    those of the span.

    Attributes:
        batch, nodes: B' and N'.
        tokens: B N of the span.
        length: L, number of keys of a row.
        chains: map from the span's tokens to queries and back, None for the identity.
        span: span that attention computes.
        trees: kernel inputs made from the span once for all layers, by query heads per key head.
        slots, positions: [B, N] slots and positions of the span's tokens.
    """

    def __init__(self, span: Span, table: PageTable, dtype: torch.dtype) -> None:
        self.tokens = span.ancestor_mask.shape[0] * span.nodes
        self.length = -(-span.longest // KEY_BLOCK) * KEY_BLOCK
        self.dtype = dtype
        index = _index(span)
        self.positions = (span.starts.unsqueeze(1) + depth(span.ancestor_mask))[:, -span.nodes :]
        self.slots = table.slots(span.rows, index[:, -span.nodes :]).flatten()
        self._masks: dict[tuple[int | None, bool, int, int], Tensor] = {}
        self.chains = None
        self.key_slots: Tensor | None = None
        if (
            span.starts.device.type == "cpu"
            and span.nodes == span.ancestor_mask.shape[1]
            and not is_chain(span.ancestor_mask)
        ):
            self.chains = chains(span.ancestor_mask)
            span = self._straightened(span, table, self.chains)
        self.batch, self.nodes = span.ancestor_mask.shape[0], span.nodes
        self.first_slot = None
        if self.batch == 1 and self.chains is None and span.host_rows:
            self.first_slot = table.first_slot(span.host_rows[0], self.length)
        self.page_index = table.table[span.rows][:, : -(-self.length // table.page_size)]
        self.span = span
        self.trees: dict[int, Any] = {}

    def _straightened(self, span: Span, table: PageTable, parts: Chains) -> Span:
        """Span of the chains, whose keys have the slots `key_slots` [C, L]."""
        rows, starts = span.rows[parts.rows], span.starts[parts.rows].unsqueeze(1)
        count, nodes = parts.path.shape
        self.key_slots = table.slots(rows, torch.arange(self.length).expand(count, -1))
        self.key_slots.scatter_(1, starts + torch.arange(nodes), table.slots(rows, starts + parts.path))
        ancestor_mask = chain_mask(count, nodes)
        return Span(rows, (), starts.squeeze(1), ancestor_mask, nodes, span.longest)

    def mask(self, window: int | None, chunked: bool, groups: int, tile: int) -> Tensor:
        """Additive mask [B * tiles, 1, groups * tile, L], with the nodes padded to whole tiles and groups outermost."""
        key = (window, chunked, groups, tile)
        if key not in self._masks:
            self._masks[key] = self._build(*key)
        return self._masks[key]

    def _build(self, window: int | None, chunked: bool, groups: int, tile: int) -> Tensor:
        span = self.span
        index = torch.arange(self.length, device=span.starts.device)
        visible = (index < span.starts.view(-1, 1, 1)).expand(-1, self.nodes, -1).contiguous()
        columns = _index(span)
        visible.scatter_(2, columns.unsqueeze(1).expand(-1, self.nodes, -1), span.ancestor_mask[:, -self.nodes :])
        if window is not None:
            positions = span.starts.unsqueeze(1) + depth(span.ancestor_mask)
            at = index.expand(self.batch, -1).scatter(1, columns, positions)
            own, at = positions[:, -self.nodes :].unsqueeze(2), at.unsqueeze(1)
            visible &= at // window == own // window if chunked else own - at < window
        mask = torch.zeros(visible.shape, dtype=self.dtype, device=index.device)
        mask.masked_fill_(~visible, float("-inf"))
        tiles = -(-self.nodes // tile)
        if tiles * tile > self.nodes:  # padding queries repeat the last node's mask: softmax needs one visible key
            mask = torch.cat([mask, mask[:, -1:].expand(-1, tiles * tile - self.nodes, -1)], dim=1)
        mask = mask.view(self.batch * tiles, 1, 1, tile, self.length)
        return mask.expand(-1, 1, groups, -1, -1).reshape(self.batch * tiles, 1, groups * tile, self.length)


class View:
    """All spans of one forward, with tokens concatenated span by span; tensors for torch are made on first use.

    Attributes:
        spans: spans in order.
        table: page table of the spans.
    """

    def __init__(self, spans: Sequence[Span], table: PageTable, dtype: torch.dtype) -> None:
        self.spans, self.table, self._dtype = tuple(spans), table, dtype

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """Spans in the form that attention computes."""
        return tuple(Segment(span, self.table, self._dtype) for span in self.spans)

    @cached_property
    def positions(self) -> Tensor:
        """Positions [T] for RoPE."""
        return torch.cat([segment.positions.flatten() for segment in self.segments])

    @cached_property
    def slots(self) -> Tensor:
        """Slots [T] of the new keys and values."""
        return torch.cat([segment.slots for segment in self.segments])


class CacheShape(Protocol):
    """Protocol (of `ModelConfig`) with the sizes of a token's cached keys and values in each layer.

    Attributes:
        cached_heads: number of key vectors.
        cached_parts: sizes of the parts of a key or value vector; each part has its own scale if codes are stored.
        shared_values: true if keys and values are the same vectors, which are stored once.
    """

    @property
    def num_layers(self) -> int: ...
    @property
    def cached_heads(self) -> int: ...
    @property
    def cached_parts(self) -> tuple[int, ...]: ...
    @property
    def shared_values(self) -> bool: ...


class KVCache:
    """Keys and values of every layer, addressed through a shared `PageTable`.

    Attributes:
        keys, values: [layers, slots, kv heads, D] in the format `kv_format`; one tensor if values are shared.
        key_scales, value_scales: [layers, slots, kv heads * parts] float32 of codes, otherwise None; the slots of a
            head are contiguous in memory, since attention reads one head at a time.
        parts: sizes of the parts of a vector, each with its own scale.
        dtype: dtype of the vectors that are written and read.
        kv_format: storage format of a vector.
        on_commit: called with the arguments of `commit`, so that other ranks repeat the move in their caches.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        table: PageTable,
        dtype: torch.dtype,
        device: torch.device | str,
        kv_format: KVFormat = OWN,
        shared_values: bool = False,
        parts: tuple[int, ...] = (),
        pages: int | None = None,
    ) -> None:
        self.parts = parts or (head_dim,)
        shape = (layers, (pages or table.pages) * table.page_size, kv_heads)
        self.table, self.dtype, self.kv_format = table, dtype, kv_format
        self.on_commit: Callable[[Tensor, Tensor, Tensor], object] = lambda rows, starts, path: None
        # Zeros, not empty: a masked key still enters the sum as 0 * value, which is NaN for an uninitialised NaN.
        stored = (*shape, head_dim), kv_format.dtype(dtype), torch.device(device)
        self.keys = zeros(*stored)
        self.values = self.keys if shared_values else zeros(*stored)
        self.key_scales: Tensor | None = None
        self.value_scales: Tensor | None = None
        if kv_format.greatest is not None:
            sizes = 2, layers, kv_heads * len(self.parts), shape[1]
            scales = zeros(sizes, torch.float32, torch.device(device)).transpose(2, 3)
            self.key_scales, self.value_scales = (scales[0], scales[0]) if shared_values else scales.unbind()

    @staticmethod
    def of(
        shape: CacheShape, table: PageTable, dtype: torch.dtype, device: torch.device | str, kv_format: KVFormat = OWN,
        pages: int | None = None,
    ) -> KVCache:  # fmt: skip
        """KV cache of a decoder or a head, of the table's `pages` unless a number is given."""
        sizes, parts = (shape.num_layers, shape.cached_heads), shape.cached_parts
        return KVCache(*sizes, sum(parts), table, dtype, device, kv_format, shape.shared_values, parts, pages)

    @staticmethod
    def bytes_per_page(shape: CacheShape, page_size: int, dtype: torch.dtype, kv_format: KVFormat = OWN) -> int:
        vectors = (1 if shape.shared_values else 2) * shape.num_layers * shape.cached_heads
        return vectors * page_size * kv_format.vector_bytes(shape.cached_parts, dtype)

    @property
    def stored(self) -> list[tuple[Tensor, Tensor | None]]:
        """Stored tensors with their scales: keys, and values if they are separate; [layers, slots, ...]."""
        found = [(self.keys, self.key_scales), (self.values, self.value_scales)]
        return found[:1] if self.values is self.keys else found

    def clear(self) -> None:
        """Erase every vector and return the memory to the system; does nothing on a GPU."""
        for stored in chain.from_iterable(self.stored):
            if stored is not None:
                clear(stored)

    def view(self, spans: Sequence[Span]) -> View:
        """View of this cache for the spans of one forward."""
        return View(spans, self.table, self.dtype)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store [T, kv heads, D] keys and values."""
        for x, (stored, scales) in zip((keys, values), self.stored, strict=False):
            codes, scale = self.kv_format.encode_parts(x, self.parts)
            stored[layer].index_copy_(0, slots, codes)
            if scales is not None and scale is not None:
                scales[layer].index_copy_(0, slots, scale)

    def read(self, layer: int, segment: Segment) -> tuple[Tensor, Tensor]:
        """Keys and values [B, kv heads, L, D] of a segment; a view if the row's pages are adjacent."""
        read = [self._read(layer, segment, *stored) for stored in self.stored]
        return read[0], read[-1]

    def _read(self, layer: int, segment: Segment, stored: Tensor, scales: Tensor | None) -> Tensor:
        scale = None if scales is None else self._gather(scales[layer], segment)
        found = self.kv_format.decode_parts(self._gather(stored[layer], segment), scale, self.parts, self.dtype)
        return found.transpose(1, 2)

    def _gather(self, stored: Tensor, segment: Segment) -> Tensor:
        """Stored values [B, L, ...] of each slot."""
        if segment.first_slot is not None:
            return stored[segment.first_slot : segment.first_slot + segment.length].unsqueeze(0)
        if segment.key_slots is not None:
            return stored[segment.key_slots]
        pages = stored.view(-1, self.table.page_size, *stored.shape[1:])
        rows = pages[segment.page_index].flatten(1, 2)
        missing = segment.length - rows.shape[1]
        if missing > 0:  # the table ends before the padded key length; masked keys may be anything finite
            rows = torch.cat([rows, rows.new_zeros(segment.batch, missing, *rows.shape[2:])], dim=1)
        return rows[:, : segment.length]

    def commit(self, rows: Tensor, starts: Tensor, path: Tensor) -> None:
        """Move the nodes of `path` [B, K] to the indexes `start, start + 1, ...` of their rows."""
        self.on_commit(rows, starts, path)
        front = torch.arange(path.shape[1], device=path.device)
        if not torch.equal(path, front.minimum(path[:, -1:])):
            self.move(rows, starts, path)

    def move(self, rows: Tensor, starts: Tensor, path: Tensor) -> None:
        """`commit` without reading a value on the host, for captured steps."""
        front = torch.arange(path.shape[1], device=path.device).expand_as(path)
        source = self.table.slots(rows, starts.unsqueeze(1) + path).flatten()
        target = self.table.slots(rows, starts.unsqueeze(1) + front).flatten()
        for stored in chain.from_iterable(self.stored):
            if stored is not None:
                stored.index_copy_(1, target, stored.index_select(1, source))
