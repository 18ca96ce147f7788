"""Tensors whose bytes stay in the system's file cache, each with a memory mapping of its own.

One mapping of a whole file would keep every page that was read in the memory of this process.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

AHEAD = 32 << 20  # unit of read-ahead in bytes; large, since the kernel visits every page of a request


def mapped(file: Path, start: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Map a tensor at byte `start` of a file, which is closed at once; the pages are released with the tensor.

    Raises:
        OSError, ValueError: the file cannot be mapped or ends before the tensor does.
    """
    size = dtype.itemsize
    for each in shape:
        size *= each
    if size == 0:
        return torch.empty(shape, dtype=dtype)
    skipped = start % mmap.ALLOCATIONGRANULARITY
    first, last = -(-start // AHEAD), (start + size) // AHEAD  # multiples of AHEAD within the tensor
    with file.open("rb", buffering=0) as opened:
        # Copy-on-write pages, since torch has no read-only tensors; no code writes to them.
        pages = mmap.mmap(opened.fileno(), skipped + size, access=mmap.ACCESS_COPY, offset=start - skipped)
        if first <= last and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(opened.fileno(), first * AHEAD, (last + 2 - first) * AHEAD, os.POSIX_FADV_WILLNEED)
    found = torch.frombuffer(pages, dtype=torch.uint8, count=size, offset=skipped)
    if found.data_ptr() % dtype.itemsize:
        found = found.clone()
    return found.view(dtype).view(tuple(shape))
