"""Shared memory of the ranks of one host, which compiled code uses in place of gloo.

The memory has no name: rank 0 creates it, the others map it through the descriptor of rank 0, and the kernel frees it
when the last process ends. Linux only.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
from collections.abc import Sequence
from ctypes import addressof, c_char

from torch import Tensor

from sametoken.kernels.cpu.library import Library
from sametoken.kernels.cpu.structures import CExchange
from sametoken.parallel.place import RankPlace
from sametoken.runtime.ranks import NativeExchange

MEMORY_SWITCH = "SAMETOKEN_RANK_MEMORY"  # "off": use the network within a host too
SLOT = 1 << 22  # bytes that a rank shares at once
POST, TOKEN = 128, 16  # bytes of the counter of a rank, see exchange.h, and of the identity of a memory


class SharedMemory:
    """Transport over the shared memory of a host; rank 0 constructs it first.

    Args:
        kernels: library whose calls use the memory.
        description: description of the memory by rank 0, None on rank 0.

    Raises:
        OSError: the memory is not accessible: no Linux, or rank 0 is on another host or hidden from this process.
    """

    def __init__(self, place: RankPlace, kernels: Library, description: str | None = None) -> None:
        self._kernels, size = kernels, place.size * (POST + 2 * SLOT)
        token = secrets.token_hex(TOKEN // 2).encode()
        if description is None:
            if not hasattr(os, "memfd_create"):
                raise OSError("memory without a name needs Linux")
            self._file = os.memfd_create("sametoken")
            os.ftruncate(self._file, size + TOKEN)
        else:
            process, number, stated = json.loads(description)
            self._file, token = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR), stated.encode()
        try:
            self._memory = mmap.mmap(self._file, size + TOKEN)
        except (ValueError, OSError) as error:
            os.close(self._file)
            raise OSError(str(error)) from error
        if description is None:
            self._memory[size:] = token
            self.description = json.dumps([os.getpid(), self._file, token.decode()])
        else:
            os.close(self._file)
            if self._memory[size:] != token:
                raise OSError("another process of this host has rank 0's number")
        start = addressof(c_char.from_buffer(self._memory))
        self._exchange = CExchange(start, SLOT, place.rank, place.size, 0, 0)
        self.native = NativeExchange(*kernels.exchanges, addressof(self._exchange))

    def mapped(self) -> None:
        """Close the descriptor on rank 0, once all ranks have mapped the memory or given up."""
        os.close(self._file)

    def send(self, data: Tensor) -> None:
        """Implement `Transport.send`."""
        self._kernels.send(self._exchange, data)

    def sum(self, partial: Tensor) -> None:
        """Implement `Transport.sum`."""
        self._kernels.sum(self._exchange, partial)

    def gather(self, own: Tensor, begins: Sequence[int], *, everywhere: bool) -> Tensor:
        """Implement `Transport.gather`."""
        return self._kernels.gather(self._exchange, own, begins, everywhere=everywhere)

    def stop(self, *, hangs: bool) -> None:
        """Implement `Transport.stop`."""
        self._exchange.stopped = 1
