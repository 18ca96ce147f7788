"""SIGINT and SIGTERM as a request to stop: work is kept and said how to go on; a second signal ends the process.

Where nothing can be kept a signal raises KeyboardInterrupt, SIGTERM too, so that both end a command the same way. In a
coroutine it cancels the task.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = 130  # the exit code of a command that a signal ended before its work was done


class Stop:
    """Request to stop by a signal; true once one has arrived.

    Attributes:
        signal: the first that arrived, None before.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._raises = False

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """Exit code in a shell of a process that this signal ended: 130 for SIGINT, 143 for SIGTERM; 0 without a
        signal.
        """
        return 0 if self.signal is None else 128 + self.signal

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Within the block a signal raises KeyboardInterrupt; so do entering it, and any error, after a signal."""
        with self._mode(True):
            if self:
                raise KeyboardInterrupt
            try:
                yield
            except Exception as error:
                if self:  # compiled code turns what is raised within it into errors of its own
                    raise KeyboardInterrupt from error
                raise

    @contextmanager
    def noticed(self) -> Iterator[None]:
        """Within the block a signal only makes this object true, inside `at_once` too."""
        with self._mode(False):
            yield

    @contextmanager
    def _mode(self, raises: bool) -> Iterator[None]:
        before, self._raises = self._raises, raises
        try:
            yield
        finally:
            self._raises = before


@contextmanager
def cancel_at_signals() -> Iterator[Stop]:
    """Within the block the first signal cancels the running task, a second ends the process; ignored ones stay ignored.

    Where the event loop takes no signals (Windows, another thread than the main one) they act as before.
    """
    loop, task, stop = asyncio.get_running_loop(), asyncio.current_task(), Stop()
    taken: list[signal.Signals] = []

    def note(number: signal.Signals) -> None:
        stop.signal = number
        for each in taken:
            loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_DFL)
        taken.clear()
        assert task is not None
        task.cancel()

    with suppress(NotImplementedError, ValueError, RuntimeError):
        for each in SIGNALS:
            if signal.getsignal(each) is not signal.SIG_IGN:
                loop.add_signal_handler(each, note, each)
                taken.append(each)
    try:
        yield stop
    finally:
        for each in taken:
            loop.remove_signal_handler(each)


@contextmanager
def stop_at_signals(promise: str = "", repeats_after_s: float = 0.0) -> Iterator[Stop]:
    """Take SIGINT and SIGTERM within the block; a signal that was ignored before (`nohup`, `trap ''`) stays so.

    Args:
        promise: what happens after the first signal where it does not raise, said on standard error; "" says nothing.
        repeats_after_s: signals that follow the first within this time are the same one. Launchers of several processes
            pass signals on that their processes may have had already.

    Yields:
        Is never true in another thread than the main one, which alone can take signals.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {each: signal.getsignal(each) for each in SIGNALS}
    first_s = 0.0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal first_s
        if stop and time.monotonic() - first_s < repeats_after_s:
            return
        if stop:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        stop.signal, first_s = signal.Signals(number), time.monotonic()
        if not repeats_after_s:  # not by this function, which waits for the end of a long computation
            for each in taken:
                signal.signal(each, signal.SIG_DFL)
        if stop._raises:
            raise KeyboardInterrupt
        if promise:  # not print, whose lock the interrupted code may hold
            os.write(2, f"\n{stop.signal.name}: {promise}; a second signal ends the process at once\n".encode())

    taken = [each for each in SIGNALS if before[each] is not signal.SIG_IGN]
    for each in taken:
        signal.signal(each, handle)
    try:
        yield stop
    finally:
        for each in taken:
            signal.signal(each, before[each] if before[each] is not None else signal.SIG_DFL)
