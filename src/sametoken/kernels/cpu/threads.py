"""Number of threads of a call of the compiled library, given the number of torch's threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# One thread reads weights that fit a core's own cache in less time than two threads take to synchronise.
ALONE_BYTES = 2**19


class _Team(threading.local):
    """Number of threads for calls from this thread while torch itself has one."""

    size: int | None = None


_team = _Team()


@contextmanager
def serial_torch() -> Iterator[int]:
    """Limit torch to one thread and give its others to the library, since both would compete for the same cores.

    The value is the number of threads.
    """
    if _team.size is not None:
        yield _team.size
        return
    _team.size = threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)
        _team.size = None


def threads_for(nbytes: int) -> int:
    """Number of threads for a call that reads `nbytes` of weights."""
    return 1 if nbytes <= ALONE_BYTES else _team.size or torch.get_num_threads()
