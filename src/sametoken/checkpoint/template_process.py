"""Child processes that render chat templates, one conversation at a time each.

The kernel limits the cost of a template (see `templating`): a child that exceeds its time is ended, and the next
conversation gets a new one. A conversation takes about 0.3 ms more than in this process.
"""

from __future__ import annotations

import atexit
import json
import marshal
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Any, cast

from sametoken.checkpoint.templating import COSTLY, HEADER, MOST_MEMORY, TEMPLATE_SECONDS, environment_of_child

CHILD = "import sys; sys.path[:] = sys.argv[1:]; from sametoken.checkpoint.templating import main; main()"
MOST_WAIT = 30.0  # seconds of wall-clock time for a reply, on a busy machine
KEPT = 2  # idle processes that are kept


class _Process:
    """Child process."""

    def __init__(self) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-c", CHILD, *sys.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, env=environment_of_child(),
        )  # fmt: skip

    def answer(self, job: bytes) -> bytes | None:
        """Reply of the process to a job; None if the process ended, or did not reply within MOST_WAIT seconds."""
        given = cast(IO[bytes], self._child.stdin)
        try:
            given.write(len(job).to_bytes(HEADER, "little") + job)
            given.flush()
        except BrokenPipeError:
            return None
        last = time.monotonic() + MOST_WAIT
        size = self._read(HEADER, last)
        return None if size is None else self._read(int.from_bytes(size, "little"), last)

    def _read(self, size: int, last: float) -> bytes | None:
        handle, found = cast(IO[bytes], self._child.stdout).fileno(), bytearray()
        ready = select.poll()
        ready.register(handle, select.POLLIN)
        while len(found) < size:
            left = last - time.monotonic()
            if left < 0 or not ready.poll(1000 * left):
                return None
            if not (piece := os.read(handle, min(size - len(found), 2**20))):
                return None
            found += piece
        return bytes(found)

    def end(self) -> int:
        """End the process, and return its exit status."""
        self._child.kill()
        for pipe in (self._child.stdin, self._child.stdout):
            with suppress(BrokenPipeError):
                cast(IO[bytes], pipe).close()
        return self._child.wait()


class _Processes:
    """Child processes of this process, started on demand."""

    def __init__(self) -> None:
        self._lock, self._idle, self._owner = threading.Lock(), list[_Process](), os.getpid()
        atexit.register(self._end)

    def answer(self, job: bytes) -> tuple[str, str]:
        """Kind and text of a child's reply to a job; COSTLY if the child ends or does not reply in time."""
        process, fresh = self._take()
        if (said := process.answer(job)) is None and not fresh and process.end() != -signal.SIGPROF:
            process, _ = self._begun()  # ended while idle, or by the job, which will end the next one too
            said = process.answer(job)
        if said is None:
            process.end()
            words = f"takes more than {TEMPLATE_SECONDS:g} s or {MOST_MEMORY >> 20} MiB"
            return COSTLY, words
        kind, words = json.loads(said)
        if kind == COSTLY:  # memory of the job may not be released
            process.end()
        else:
            self._keep(process)
        return kind, words

    def _take(self) -> tuple[_Process, bool]:
        """Idle or new process, and true if it is new."""
        with self._lock:
            if self._owner != os.getpid():  # after a fork, the children belong to the parent
                self._idle, self._owner = [], os.getpid()
            if self._idle:
                return self._idle.pop(), False
        return self._begun()

    @staticmethod
    def _begun() -> tuple[_Process, bool]:
        return _Process(), True

    def _keep(self, process: _Process) -> None:
        with self._lock:
            if len(self._idle) < KEPT:
                self._idle.append(process)
                return
        process.end()

    def _end(self) -> None:
        if self._owner == os.getpid():
            while self._idle:
                self._idle.pop().end()


_PROCESSES = _Processes()


def ask(template: str, messages: Sequence[Mapping[str, Any]] | None, variables: Mapping[str, Any]) -> tuple[str, str]:
    """Kind of the result (a constant of `templating`), and the text of a conversation or an error message.

    Args:
        messages: None to only parse the template.

    Raises:
        OSError: no process could be started.
        RecursionError: the values nest too deeply.
    """
    given: Any = (template, messages, variables)
    try:
        job = marshal.dumps(given)
    except ValueError:  # types that only resemble those of JSON
        try:
            job = marshal.dumps((template, _plain(messages), _plain(variables)))
        except ValueError as error:
            raise RecursionError("it nests too deeply") from error
    return _PROCESSES.answer(job)


def _plain(value: Any) -> Any:
    """Value in the types of JSON; other objects become text."""
    if value is None or type(value) in (str, int, float, bool, bytes):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(each) for key, each in value.items()}
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, str | bytes):
        return [_plain(each) for each in value]
    for kind in (str, bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    return str(value)
