"""Memory for tensors that every step reads in full (weights, KV cache), and for temporary tensors of loading.

Such tensors use huge pages where the system grants them: ordinary pages take an address translation every 4 KiB, which
costs memory bandwidth. Temporary tensors reuse memory: the first write to a page costs more than later ones, on virtual
machines up to thirty times as much.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

HUGE = 2**21
LEAST_BYTES = 2 * HUGE  # smaller tensors hardly contain one whole huge page
POPULATE_READ = 22  # of madvise
LEAST_LENT = 2**18  # smaller tensors are left to the C library
MOST_WASTE = 4  # times the requested size
MOST_SPARE = 16  # pieces of memory; more are in use at once only where tensors are kept
_mapped = weakref.WeakSet[mmap.mmap]()  # mappings of files that can be read again
_spare: list[mmap.mmap] = []  # free pieces of `lent_memory`


def settled(source: Tensor) -> Tensor:
    """Contiguous copy of `source`, which may be any view."""
    return new_memory(source.shape, source.dtype).copy_(source)


def new_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Uninitialised tensor."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    target = torch.empty(shape, dtype=dtype, device=device)
    if advice is not None and target.device.type == "cpu" and target.nbytes >= LEAST_BYTES:
        begin = -(-target.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = target.data_ptr() + target.nbytes - begin
        # A failure (feature missing or switched off) leaves ordinary pages, which only cost speed.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), advice)
    return target


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Tensor of zeros; a large one on the CPU takes memory from the system page by page, as it is written.

    Raises:
        MemoryError: the system grants no such address space.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < LEAST_BYTES:
        return torch.zeros(shape, dtype=dtype, device=device)
    try:
        memory = mmap.mmap(-1, -(-size // HUGE) * HUGE, mmap.MAP_PRIVATE)
    except OSError as error:
        raise MemoryError(f"cannot allocate {size} bytes") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(tuple(shape))


def clear(tensor: Tensor) -> None:
    """Return the memory of a tensor of `zeros` to the system, on Linux; its elements are zeros again."""
    if tensor.device.type == "cpu" and tensor.untyped_storage().nbytes() >= LEAST_BYTES and sys.platform == "linux":
        storage = tensor.untyped_storage()
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(storage.data_ptr()), ctypes.c_size_t(storage.nbytes()), mmap.MADV_DONTNEED
        )


def read_ahead(pages: mmap.mmap) -> None:
    """Map the pages of a mapped file in a thread, on Linux 5.14 and later, so that a step meets no page faults."""

    def populate(address: int, size: int) -> None:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), POPULATE_READ)
        del held[:]

    _mapped.add(pages)
    held = [ctypes.c_char.from_buffer(pages)]  # keeps the mapping there
    if sys.platform == "linux":
        threading.Thread(target=populate, args=(ctypes.addressof(held[0]), len(pages)), daemon=True).start()


def give_back_files() -> None:
    """Drop the pages of mapped files from this process's memory, on Linux; later reads load them again."""
    if hasattr(mmap, "MADV_DONTNEED") and sys.platform == "linux":
        for pages in list(_mapped):
            pages.madvise(mmap.MADV_DONTNEED)


def lent_memory(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Uninitialised temporary tensor, whose memory is reused for the next one until `release` is called."""
    size = math.prod(shape) * dtype.itemsize
    if size < LEAST_LENT:
        return torch.empty(shape, dtype=dtype)
    # A piece that is far too large would stay resident as long as a small tensor in it.
    fitting = [memory for memory in list(_spare) if size <= len(memory) <= MOST_WASTE * size]
    memory = min(fitting, key=len, default=None)
    if memory is None:
        _spare[:] = [memory for memory in _spare if len(memory) > size]  # replaces the small ones
        memory = mmap.mmap(-1, size if size < HUGE else -(-size // HUGE) * HUGE, mmap.MAP_PRIVATE)
        if size >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)
    else:
        _spare.remove(memory)
    view = (ctypes.c_byte * size).from_buffer(memory)
    weakref.finalize(view, _give_back, memory).atexit = False
    return torch.frombuffer(view, dtype=dtype).view(tuple(shape))


def _give_back(memory: mmap.mmap) -> None:
    if len(_spare) < MOST_SPARE:
        _spare.append(memory)


def release() -> None:
    """Return pages that freed tensors left in the heap to the system, if the C library can do so (glibc)."""
    del _spare[:]
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
