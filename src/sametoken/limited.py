"""Work on untrusted data in child processes whose CPU time and memory the kernel limits.

A chat template, the rules of a tokenizer and a grammar may run for hours or fill the memory, in one call that no thread
can end. A process can be ended. It works on one job after the other; a job takes about 0.3 ms more than in this
process. This module imports only the standard library, so that a process starts within 0.1 s.

A module with work has `LIMITS`, which are `JobLimits`, and `begin`, which imports libraries before the limits hold and
returns the function that replies to a job, from bytes to bytes.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from importlib import import_module
from typing import IO, Any, NamedTuple, cast

CHILD = "import sys; sys.path[:] = sys.argv[2:]; from sametoken.limited import serve; serve(sys.argv[1])"
HEADER = 8  # bytes of the length before each job and each reply
KEPT = 2  # idle processes that wait for a further job
KEPT_SIZE = 2**27  # resident bytes of a process that is kept; a larger one ends, which frees the memory of its jobs
NAMES = ("TZ", "LANG", "LC_ALL", "LC_TIME", "PATH", "LD_LIBRARY_PATH", "PYTHONHOME")


class JobLimits(NamedTuple):
    """Limits of one job.

    Attributes:
        seconds: CPU time; in wall-clock time a busy machine would end jobs that an idle one completes.
        memory: bytes that the job may allocate.
        wait: seconds of wall-clock time until the reply.
    """

    seconds: float
    memory: int
    wait: float

    def __str__(self) -> str:
        return f"takes more than {self.seconds:g} s or {self.memory >> 20} MiB"


def serve(module: str) -> None:
    """Reply to jobs from standard input until it ends; the entry point of a child process.

    Args:
        module: name of a module with work. An error of its function ends the process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when this process ends
    work: Any = import_module(module)
    reply, given, answers = work.begin(), sys.stdin.buffer, sys.stdout.buffer
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(limit, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    while len(size := given.read(HEADER)) == HEADER:
        job = given.read(int.from_bytes(size, "little"))
        most = size_of("self") + work.LIMITS.memory
        resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
        signal.setitimer(signal.ITIMER_PROF, work.LIMITS.seconds)  # the default action of its signal ends the process
        answer = reply(job)
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(len(answer).to_bytes(HEADER, "little") + answer)
        answers.flush()


def size_of(process: int | str, *, resident: bool = False) -> int:
    """Size in bytes of a process's address space, or of its part that is in memory; "self" is this process."""
    with open(f"/proc/{process}/statm", encoding="ascii") as stated:
        return int(stated.read().split()[resident]) * resource.getpagesize()


def environment() -> dict[str, str]:
    """Environment variables that a child process needs, without API keys and tokens."""
    return {name: os.environ[name] for name in NAMES if name in os.environ}


class Limited:
    """Child processes for one kind of work, started on demand and ended with this object.

    Args:
        module: name of a module with work.
        limits: its limits.
    """

    def __init__(self, module: str, limits: JobLimits) -> None:
        self._module, self._wait = module, limits.wait
        self._lock, self._idle, self._owner = threading.Lock(), list[_Process](), os.getpid()
        weakref.finalize(self, _end, self._idle, self._owner)

    def reply(self, job: bytes) -> bytes | None:
        """Reply to a job; None if the job exceeds a limit or fails.

        Raises:
            OSError: no process could be started.
        """
        process = self._take()
        said = process.reply(job, self._wait)
        if said is None:
            process.end()
        else:
            self._keep(process)
        return said

    def _take(self) -> _Process:
        """Process that waits for a job, or a new one."""
        with self._lock:
            if self._owner != os.getpid():  # after a fork, the children belong to the parent
                self._idle, self._owner = [], os.getpid()
                weakref.finalize(self, _end, self._idle, self._owner)
            while self._idle:
                process = self._idle.pop()
                if process.is_alive():
                    return process
                process.end()
        return _Process(self._module)

    def _keep(self, process: _Process) -> None:
        with self._lock:
            if len(self._idle) < KEPT and process.size() <= KEPT_SIZE:
                self._idle.append(process)
                return
        process.end()


def _end(idle: list[_Process], owner: int) -> None:
    while owner == os.getpid() and idle:
        idle.pop().end()


class _Process:
    """Child process."""

    def __init__(self, module: str) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-c", CHILD, module, *sys.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, env=environment(),
        )  # fmt: skip

    def is_alive(self) -> bool:
        return self._child.poll() is None

    def size(self) -> int:
        """Bytes of the process that are in memory; 0 if it has ended."""
        try:
            return size_of(self._child.pid, resident=True)
        except OSError:
            return 0

    def reply(self, job: bytes, wait: float) -> bytes | None:
        """Reply of the process to a job; None if the process ended, or did not reply within `wait` seconds."""
        given, last = cast(IO[bytes], self._child.stdin), time.monotonic() + wait
        try:
            given.write(len(job).to_bytes(HEADER, "little") + job)
            given.flush()
        except BrokenPipeError:
            return None
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

    def end(self) -> None:
        """End the process."""
        self._child.kill()
        for pipe in (self._child.stdin, self._child.stdout):
            with suppress(BrokenPipeError):
                cast(IO[bytes], pipe).close()
        self._child.wait()
