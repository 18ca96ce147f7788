"""Another engine's server as a child of this process, which ends with it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from types import FrameType

from sametoken.errors import ConfigError, SametokenError

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy must not see keys
SHOWN = 30  # last lines of a log
KILL_S = 10.0  # between SIGKILL to the server and to its group
DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG


def end_with_parent() -> Callable[[], object]:
    """Function that a child calls before it begins, so that it gets SIGTERM when the thread that started it ends."""
    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(DEATH_SIGNAL, signal.SIGTERM)


def wait_for(
    process: subprocess.Popen[bytes], name: str, url: str, seconds: float, stopped: Callable[[], bool],
    reason: Callable[[], str],
) -> bool:  # fmt: skip
    """Wait until a URL answers with 200; False if `stopped` came before.

    Args:
        name: of the process, for errors. reason: end of the error of a process that ended.

    Raises:
        SametokenError: the process ended, or did not answer in time.
    """
    end = time.monotonic() + seconds
    while not stopped():
        if (code := process.poll()) is not None:
            raise SametokenError(f"{name} ended with exit code {code} before it answered{reason()}")
        with suppress(OSError, HTTPException), DIRECT.open(url, timeout=5):
            return True
        if time.monotonic() >= end:
            raise SametokenError(f"{url} did not answer within {seconds:g} s{reason()}")
        time.sleep(0.2)
    return False


@contextmanager
def noted_signals(then: Callable[[], object] = lambda: None) -> Iterator[list[int]]:
    """Numbers of the signals that would end this process, as they come; under nohup SIGHUP stays ignored.

    Args:
        then: called after each.
    """
    signals: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        then()

    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, *hangup)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Child:
    """A server in a process group of its own, whose output goes to a log."""

    def __init__(self, words: Sequence[str], log: Path, environment: dict[str, str]) -> None:
        """Raise ConfigError if there is no such program."""
        self.words, self.log = words, log
        with log.open("wb") as output:
            try:
                self.process = subprocess.Popen(
                    words, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment,
                    start_new_session=True, preexec_fn=end_with_parent(),
                )  # fmt: skip
            except OSError as error:
                raise ConfigError(
                    f"{words[0]} cannot be started: {error.strerror}; install the engine, or name the Python of its "
                    "environment with --engine-python"
                ) from error

    def wait_for(self, url: str, seconds: float, stopped: Callable[[], bool]) -> bool:
        """Wait as `wait_for` does; its errors come with the end of the log."""
        return wait_for(self.process, self.words[0], url, seconds, stopped, self._last)

    def end(self, seconds: float) -> int:
        """Terminate the server, kill it and its group after `seconds`; return its exit code."""
        with suppress(ProcessLookupError):
            self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait(KILL_S)

    def _last(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-SHOWN:]
        return f"; the end of {self.log}:\n" + "\n".join(lines)


def start(
    words: Sequence[str], files: dict[str, str], port: int, times: tuple[float, float], tell: Callable[[str], object]
) -> int:
    """Run a server until it ends or a signal does.

    Args:
        words: the command; a word that is a name in `files` becomes the path of that file.
        files: contents by name.
        port: where /health answers.
        times: seconds to start, and seconds that open requests may go on after a signal.

    Returns:
        The server's exit code; 0 after a signal.

    Raises:
        SametokenError: it did not start.
    """
    with tempfile.TemporaryDirectory(prefix="sametoken-") as folder, noted_signals() as signals:
        for name, text in files.items():
            (Path(folder) / name).write_text(text)
        found = [str(Path(folder) / word) if word in files else word for word in words]
        log = Path(tempfile.mkstemp(prefix="sametoken-engine-", suffix=".log")[1])
        child = Child(found, log, dict(os.environ))
        try:
            tell(f"started {words[0]}; its output goes to {log}")
            url = f"http://127.0.0.1:{port}"
            if child.wait_for(f"{url}/health", times[0], lambda: bool(signals)):
                tell(f"{url} answers")
            while child.process.poll() is None and not signals:
                time.sleep(0.1)
        finally:
            code = child.end(times[1] if signals else 0)
        if signals or code == 0:
            log.unlink(missing_ok=True)
            return 0
        tell(f"{words[0]} ended with exit code {code}; its output is in {log}")
        return code
