"""Threads for slow work such as the tokenisation of a long text, for which neither the event loop nor the end of the
process waits.

Python's own pool is joined when the loop closes and again at exit: one text of 8 MB delayed a stop by half a minute.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum
from functools import cache, partial
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
MOST = 4
_Job = tuple[Future[Any], Callable[[], Any]]


class DaemonPool(ThreadPoolExecutor):
    """Executor of daemon threads, which end with the process.

    It derives from `ThreadPoolExecutor` only because event loops require that class.

    Args:
        threads: number of jobs that run at a time; None means one per core, at most `MOST`.
    """

    def __init__(self, threads: int | None = None) -> None:
        super().__init__()
        # More threads than cores gain nothing, and tokenisation of a text of 8 MB needs a gigabyte.
        self._count = threads or min(MOST, os.cpu_count() or 1)
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        for _ in range(self._count):
            threading.Thread(target=self._work, name="sametoken-aside", daemon=True).start()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        self._jobs.put((future, lambda: fn(*args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the threads end after all queued jobs that are not cancelled, without waiting for the threads."""
        for _ in range(self._count):
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, call = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)


class SideWork(Enum):
    """Kinds of jobs of unknown duration; the value is the number of threads of the kind.

    Long prompts and /tokenize, which run in the event loop's own pool, do not wait for such jobs.
    """

    GRAMMAR = 4  # most of these jobs wait for a trial; see `engine.grammar_trial`
    TEMPLATE = 2
    SCORES = 1  # replies with many log-probabilities
    TEXT = 3  # texts for a tokenizer whose rules have an unknown cost


@cache
def _pool(work: SideWork) -> DaemonPool:
    return DaemonPool(work.value)


async def aside(work: SideWork, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function in a thread of its kind of work, and return the result, like `asyncio.to_thread`."""
    call = partial(contextvars.copy_context().run, function, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_pool(work), call)
