"""What rank 0 tells the other ranks: what to load, how large the cache is, and what each forward reads. Plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sametoken.options.engine import KVDType
from sametoken.runtime.cache import Span


class TargetToLoad(NamedTuple):
    """The target, by names that mean the same on every host."""

    model: str
    revision: str | None
    dtype: str
    max_seq_len: int
    quantization: str
    deterministic: bool


class Cache(NamedTuple):
    """The page table and what pages hold, see `PageTable` and `KVCache`."""

    rows: int
    pages: int
    pages_per_row: int
    page_size: int
    form: KVDType


class SpanOf(NamedTuple):
    """A `Span` as lists; `ancestor_mask` has its shape and a byte for each entry."""

    rows: list[int]
    starts: list[int]
    shape: tuple[int, ...]
    ancestor_mask: bytes
    nodes: int
    longest: int


class Moved(NamedTuple):
    """Nodes that were committed after the last forward, see `KVCache.commit`."""

    rows: list[int]
    starts: list[int]
    path: list[list[int]]


class Forward(NamedTuple):
    """One forward: what was committed before, pages of rows that have others now, and tokens at their places."""

    moved: list[Moved]
    pages: dict[int, list[int]]
    tokens: list[int]
    spans: list[SpanOf]


class End(NamedTuple):
    """Nothing more will come."""


def packed(span: Span, rows: Sequence[int]) -> SpanOf:
    """A span as data; `rows` are its rows."""
    mask = span.ancestor_mask.to(torch.uint8)
    return SpanOf(list(rows), span.starts.tolist(), tuple(mask.shape), mask.numpy().tobytes(), span.nodes, span.longest)


def unpacked(span: SpanOf) -> Span:
    """The span of a message."""
    mask = torch.frombuffer(bytearray(span.ancestor_mask), dtype=torch.uint8).view(span.shape).bool()
    return Span(_ints(span.rows), span.rows, _ints(span.starts), mask, span.nodes, span.longest)


def tensors(moved: Moved) -> tuple[Tensor, Tensor, Tensor]:
    """The arguments of `KVCache.commit`."""
    return _ints(moved.rows), _ints(moved.starts), torch.tensor(moved.path, dtype=torch.int64)


def _ints(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)
