"""SIGINT and SIGTERM as requests to stop: finished work is saved; a second signal ends the process.

Where there is nothing to save, both signals raise KeyboardInterrupt, so that both end a command in the same way. In a
coroutine they cancel the task.
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
INTERRUPTED = 130  # exit code of a command that a signal ended before its work was done


class Stop:
    """Request to stop; true once a signal has arrived.

    Attributes:
        signal: first signal that arrived, None before.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._raises = False

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """Exit code, in a shell, of a process that this signal ended: 130 for SIGINT, 143 for SIGTERM; 0 for none."""
        return 0 if self.signal is None else 128 + self.signal

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Raise KeyboardInterrupt at a signal within the block, on entry after a signal, and at errors after it."""
        with self._mode(True):
            if self:
                raise KeyboardInterrupt
            try:
                yield
            except Exception as error:
                if self:  # compiled code converts exceptions within it into other errors
                    raise KeyboardInterrupt from error
                raise

    @contextmanager
    def noticed(self) -> Iterator[None]:
        """Only record signals within the block, inside `at_once` too."""
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
    """Cancel the running task at the first signal within the block and end the process at the second.

    Ignored signals stay ignored. Where the event loop cannot handle signals (on Windows, or outside the main thread),
    they act as usual.
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
    """Handle SIGINT and SIGTERM within the block; ignored signals (`nohup`, `trap ''`) stay ignored.

    Args:
        promise: message on standard error after the first signal if it does not raise; "" for none.
        repeats_after_s: signals within this time after the first count as one: launchers of several processes pass on
            signals that the processes may have received already.

    Yields:
        Request to stop; outside the main thread, which alone receives signals, never true.
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
        if not repeats_after_s:  # not by this function, which runs only at the end of a long computation
            for each in taken:
                signal.signal(each, signal.SIG_DFL)
        if stop._raises:
            raise KeyboardInterrupt
        if promise:  # not print: the interrupted code may hold its lock
            os.write(2, f"\n{stop.signal.name}: {promise}; a second signal ends the process at once\n".encode())

    taken = [each for each in SIGNALS if before[each] is not signal.SIG_IGN]
    for each in taken:
        signal.signal(each, handle)
    try:
        yield stop
    finally:
        for each in taken:
            signal.signal(each, before[each] if before[each] is not None else signal.SIG_DFL)
