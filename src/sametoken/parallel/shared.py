"""Memory that the ranks of one host share, through which compiled code exchanges what gloo would send.

The memory has no name: rank 0 makes it, the others map it by rank 0's own descriptor, and it is gone with the last of
them, however they end. Linux only.
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

MEMORY_SWITCH = "SAMETOKEN_RANK_MEMORY"  # "off": ranks of one host use the network too
SLOT = 1 << 22  # bytes that a rank gives to the others at once
POST, TOKEN = 128, 16  # bytes of a rank's counter, see exchange.h, and of what tells one memory from another


class SharedMemory:
    """The memory of all ranks of a host; rank 0 makes it before the others.

    Args:
        kernels: the library whose calls use it.
        description: what rank 0 says of the memory, None as rank 0.

    Raises:
        OSError: this process cannot have it: it is no Linux, or the other process is on another host or hidden.
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
        """As rank 0, closes the descriptor: all ranks have the memory, or do without it."""
        os.close(self._file)

    def send(self, data: Tensor) -> None:
        """See `Transport`."""
        self._kernels.send(self._exchange, data)

    def sum(self, partial: Tensor) -> None:
        """See `Transport`."""
        self._kernels.sum(self._exchange, partial)

    def gather(self, own: Tensor, begins: Sequence[int], *, everywhere: bool) -> Tensor:
        """See `Transport`."""
        return self._kernels.gather(self._exchange, own, begins, everywhere=everywhere)

    def stop(self, *, hangs: bool) -> None:
        """See `Transport`."""
        self._exchange.stopped = 1
