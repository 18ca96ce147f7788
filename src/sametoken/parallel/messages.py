"""What rank 0 tells the other ranks: what to load, how large the cache is, and what each forward reads. Plain data."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sametoken.options.engine import KVDType
from sametoken.runtime.cache import Span
from sametoken.runtime.chains import is_chain
from sametoken.speculation.draft import chain_mask


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
    """A `Span` as lists; `ancestor_mask` has its shape and a byte for each entry, none at all for chains."""

    rows: list[int]
    starts: list[int]
    shape: tuple[int, int, int]
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


class Scores(NamedTuple):
    """Logits of these hidden states [R, H] are wanted, which are the bytes of their numbers."""

    last: bytes


class End(NamedTuple):
    """Nothing more will come."""


MESSAGES = {each.__name__: each for each in (TargetToLoad, Cache, SpanOf, Moved, Forward, Scores, End)}


class _Reader(pickle.Unpickler):
    """Reads messages and plain data: what comes from the network names no other class or function."""

    def find_class(self, module: str, name: str) -> Any:
        if module != __name__ or name not in MESSAGES:
            raise pickle.UnpicklingError(f"a message names {module}.{name}")
        return MESSAGES[name]


def read(data: bytes) -> Any:
    """The message that was pickled."""
    return _Reader(io.BytesIO(data)).load()


def packed(span: Span, rows: Sequence[int]) -> SpanOf:
    """A span as data; `rows` are its rows."""
    mask = span.ancestor_mask
    count, nodes, _ = mask.shape
    entries = b"" if is_chain(mask) else mask.to(torch.uint8).numpy().tobytes()
    return SpanOf(list(rows), span.starts.tolist(), (count, nodes, nodes), entries, span.nodes, span.longest)


def unpacked(span: SpanOf) -> Span:
    """The span of a message."""
    if span.ancestor_mask:
        mask = torch.frombuffer(bytearray(span.ancestor_mask), dtype=torch.uint8).view(span.shape).bool()
    else:
        mask = chain_mask(*span.shape[:2])
    return Span(_ints(span.rows), span.rows, _ints(span.starts), mask, span.nodes, span.longest)


def tensors(moved: Moved) -> tuple[Tensor, Tensor, Tensor]:
    """The arguments of `KVCache.commit`."""
    return _ints(moved.rows), _ints(moved.starts), torch.tensor(moved.path, dtype=torch.int64)


def _ints(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)
