"""Threads for what the event loop must not wait for, such as tokenising a long text; the end of the process does not
wait for them either.

Python's own pool is joined when the loop closes and again at exit: one text of 8 MB held up a stop for half a minute.
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
    """An executor that may be left while it works. Of `ThreadPoolExecutor` it has the name only, which loops demand.

    Args:
        threads: jobs that run at the same time; None is one per core, at most `MOST`.
    """

    def __init__(self, threads: int | None = None) -> None:
        super().__init__()
        # They compute: more than cores gain nothing, and a text of 8 MB takes a gigabyte while it is tokenised.
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
    """Jobs whose time is not known before they are done, with the number of threads of their own.

    However many of them come at once, long prompts and /tokenize, which the loop's own pool does, do not wait for them.
    """

    GRAMMAR = 4  # most of them wait for a trial; see `engine.grammar_trial`
    TEMPLATE = 2
    TEXT = 3  # of a tokenizer whose rules are of unknown cost


@cache
def _pool(work: SideWork) -> DaemonPool:
    return DaemonPool(work.value)


async def aside(work: SideWork, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """As `asyncio.to_thread`, on threads that are kept for such work."""
    call = partial(contextvars.copy_context().run, function, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_pool(work), call)
