"""Number of threads of a call of the compiled library, while torch has one or as many as torch."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Weights that fit a core's own cache are read faster by one thread than two threads agree on who reads what.
ALONE_BYTES = 2**19


class _Team(threading.local):
    """Threads of a call from this thread while torch itself has one."""

    size: int | None = None


_team = _Team()


@contextmanager
def serial_torch() -> Iterator[int]:
    """Leave torch one thread and its others to the library, whose threads would wait for the same cores as torch's.

    The value is how many threads there are.
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
    """Threads of a call that reads so many bytes of weights."""
    return 1 if nbytes <= ALONE_BYTES else _team.size or torch.get_num_threads()
