"""Memory for weights that are read from end to end in every step: on huge pages where the system grants them.

With ordinary pages a core looks up an address every 4 KiB of a stream, which costs part of the memory's speed.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

HUGE = 2**21
LEAST_BYTES = 2 * HUGE  # below this hardly one whole huge page fits


def settled(source: Tensor) -> Tensor:
    """A contiguous copy of `source`, which may be any view."""
    return new_memory(source.shape, source.dtype).copy_(source)


def new_memory(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of undefined numbers."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    target = torch.empty(shape, dtype=dtype)
    if advice is not None and not target.is_meta and target.nbytes >= LEAST_BYTES:
        begin = -(-target.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = target.data_ptr() + target.nbytes - begin
        # A refusal (no such feature, or switched off) leaves ordinary pages, which are as good but for speed.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), advice)
    return target


def release() -> None:
    """Gives the system the pages back that freed tensors left in the heap, where the C library can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
