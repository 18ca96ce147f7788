"""Copies of pages of KV caches to the host and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sametoken.runtime.cache import KVCache


def take(caches: Sequence[KVCache], pages: Sequence[int]) -> list[Tensor]:
    """Copy the contents of these pages of the caches to the host, in a fixed order.

    Returns:
        Tensors [layers, len(pages), page size, ...]: keys, values and their scales, as far as a cache has them.
    """
    return [whole[:, _index(pages, whole)].cpu() for whole in _paged(caches)]


def put(caches: Sequence[KVCache], pages: Sequence[int], kept: Sequence[Tensor]) -> None:
    """Write the result of `take`, of this or an equal engine, to these pages."""
    for whole, part in zip(_paged(caches), kept, strict=True):
        whole[:, _index(pages, whole)] = part.to(whole.device)


def shapes(caches: Sequence[KVCache], pages: int) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of each result of `take` for this number of pages."""
    return [(whole.dtype, (whole.shape[0], pages, *whole.shape[2:])) for whole in _paged(caches)]


def _paged(caches: Sequence[KVCache]) -> list[Tensor]:
    """Tensors of the caches as pages: [layers, pages, page size, ...]."""
    parts = [part for cache in caches for pair in cache.stored for part in pair if part is not None]
    size = caches[0].table.page_size
    return [part.view(part.shape[0], -1, size, *part.shape[2:]) for part in parts]


def _index(pages: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(pages, dtype=torch.int64, device=like.device)
