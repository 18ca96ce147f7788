"""Parts of files as tensors whose bytes stay in the system's file cache: each part is a mapping of its own.

One mapping for a whole file would keep every page that was read in this process's memory.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

AHEAD = 32 << 20  # bytes that the system is asked to read meanwhile; it looks at each page that it is asked for


def mapped(file: Path, start: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor at byte `start` of a file, which is open only meanwhile; its pages are given back with the tensor.

    Raises:
        OSError, ValueError: the file cannot be mapped or ends before the tensor does.
    """
    size = dtype.itemsize
    for each in shape:
        size *= each
    if size == 0:
        return torch.empty(shape, dtype=dtype)
    skipped = start % mmap.ALLOCATIONGRANULARITY
    first, last = -(-start // AHEAD), (start + size) // AHEAD  # of the multiples of AHEAD within the tensor
    with file.open("rb", buffering=0) as opened:
        # Writable copies of pages, since torch has no tensors that cannot be written to; nobody writes.
        pages = mmap.mmap(opened.fileno(), skipped + size, access=mmap.ACCESS_COPY, offset=start - skipped)
        if first <= last and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(opened.fileno(), first * AHEAD, (last + 2 - first) * AHEAD, os.POSIX_FADV_WILLNEED)
    found = torch.frombuffer(pages, dtype=torch.uint8, count=size, offset=skipped)
    if found.data_ptr() % dtype.itemsize:
        found = found.clone()
    return found.view(dtype).view(tuple(shape))
