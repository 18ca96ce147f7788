"""Messages of rank 0 to the other ranks: models to load, sizes of caches, inputs of each forward. Plain data."""

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
from sametoken.speculation.processors import Truncation
from sametoken.speculation.rows import Sampling

# Dtypes of the columns of `Draws`.
DRAW_TYPES = (torch.int64, torch.float32, torch.float32, torch.float32, torch.int64, torch.float64)


class ModelToLoad(NamedTuple):
    """Model to load, by names that are valid on every host."""

    model: str
    revision: str | None
    dtype: str
    max_seq_len: int
    quantization: str
    deterministic: bool
    rope_scaling: dict[str, Any] | None


class Models(NamedTuple):
    """Models that all ranks compute, by number: 0 is the target, 1 a draft model that is divided too."""

    target: ModelToLoad
    draft: ModelToLoad | None


class Cache(NamedTuple):
    """Sizes of page table and KV caches, see `PageTable` and `KVCache`."""

    rows: int
    pages: int
    pages_per_row: int
    page_size: int
    form: KVDType
    short_pages: int


class SpanOf(NamedTuple):
    """`Span` as lists; `ancestor_mask` is its shape and one byte per entry, without bytes for chains."""

    rows: list[int]
    starts: list[int]
    shape: tuple[int, int, int]
    ancestor_mask: bytes
    nodes: int
    longest: int


class Moved(NamedTuple):
    """Nodes of a model's cache that were committed since the last message, see `KVCache.commit`."""

    model: int
    rows: list[int]
    starts: list[int]
    path: list[list[int]]


class Changes(NamedTuple):
    """Changes of the caches since the last message: nodes that were committed, then rows that have new pages."""

    moved: list[Moved]
    pages: dict[int, list[int]]


class Forward(NamedTuple):
    """Message to run a forward of a model: tokens and their places."""

    model: int
    changes: Changes
    tokens: list[int]
    spans: list[SpanOf]


class Draws(NamedTuple):
    """`Sampling` without logits processors, as lists of one number per row; None for parameters that no row uses."""

    seed: list[int] | None
    temperature: list[float] | None
    noise_scale: list[float] | None
    max_cost: list[float] | None
    top_k: list[int] | None
    top_p: list[float] | None


class ChainsOfGuesses(NamedTuple):
    """Message to draft chains, see `Decoder.guess`: all ranks draw equal tokens."""

    model: int
    changes: Changes
    rows: list[int]
    starts: list[int]
    tokens: list[list[int]]
    skipped: list[int]
    levels: int
    draws: Draws


class Scores(NamedTuple):
    """Message to compute a model's logits from hidden states [R, H], given as bytes."""

    model: int
    last: bytes


class End(NamedTuple):
    """End of messages."""


KINDS = (ModelToLoad, Models, Cache, SpanOf, Moved, Changes, Forward, Draws, ChainsOfGuesses, Scores, End)
MESSAGES = {each.__name__: each for each in KINDS}


class _Reader(pickle.Unpickler):
    """Unpickler of messages and plain data, which rejects all other classes and functions."""

    def find_class(self, module: str, name: str) -> Any:
        if module != __name__ or name not in MESSAGES:
            raise pickle.UnpicklingError(f"a message names {module}.{name}")
        return MESSAGES[name]


def read(data: bytes) -> Any:
    """Unpickle a message."""
    return _Reader(io.BytesIO(data)).load()


def packed(span: Span, rows: Sequence[int]) -> SpanOf:
    """Message form of a span with the host rows `rows`."""
    mask = span.ancestor_mask
    count, nodes, _ = mask.shape
    entries = b"" if is_chain(mask) else mask.to(torch.uint8).numpy().tobytes()
    return SpanOf(list(rows), span.starts.tolist(), (count, nodes, nodes), entries, span.nodes, span.longest)


def unpacked(span: SpanOf) -> Span:
    """Span from its message form."""
    if span.ancestor_mask:
        mask = torch.frombuffer(bytearray(span.ancestor_mask), dtype=torch.uint8).view(span.shape).bool()
    else:
        mask = chain_mask(*span.shape[:2])
    return Span(_ints(span.rows), span.rows, _ints(span.starts), mask, span.nodes, span.longest)


def draws_of(sampling: Sampling) -> Draws:
    """Message form of the sampling of rows."""
    truncation = sampling.truncation or Truncation(None, None, None)
    columns = sampling.seed, sampling.temperature, sampling.noise_scale, *truncation
    return Draws(*(None if column is None else column.flatten().tolist() for column in columns))


def sampling_of(draws: Draws) -> Sampling:
    """Sampling from its message form."""
    columns = zip(draws, DRAW_TYPES, strict=True)
    found = [None if column is None else torch.tensor(column, dtype=dtype) for column, dtype in columns]
    seed, *others = found
    temperature, noise_scale, *truncation = (None if each is None else each.view(-1, 1, 1) for each in others)
    return Sampling(
        seed, temperature, noise_scale, Truncation(*truncation), bias=None, end_ban=None, words=None, penalties=None,
        shape=None, histories=None, grammars=None, candidates=0, greedy=seed is None, reusable=True,
    )  # fmt: skip


def tensors(moved: Moved) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments of `KVCache.commit`."""
    return _ints(moved.rows), _ints(moved.starts), torch.tensor(moved.path, dtype=torch.int64)


def _ints(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)
