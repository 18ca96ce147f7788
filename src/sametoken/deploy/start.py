"""Server of another engine as a child process, which ends with this process."""

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

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # without a proxy, which could read API keys
SHOWN = 30  # number of printed lines at the end of a log
KILL_S = 10.0  # time limit of the server's end after SIGKILL, in seconds
DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG


def end_with_parent() -> Callable[[], object]:
    """Function for `preexec_fn`: the kernel sends SIGTERM to the child when the thread that started it ends."""
    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(DEATH_SIGNAL, signal.SIGTERM)


def wait_for(
    process: subprocess.Popen[bytes], name: str, url: str, seconds: float, stopped: Callable[[], bool],
    reason: Callable[[], str],
) -> bool:  # fmt: skip
    """Wait until a URL replies with status 200; return False if `stopped` returned True before.

    Args:
        name: name of the process in errors.
        seconds: time limit.
        reason: function that returns the end of an error message.

    Raises:
        SametokenError: the process ended, or did not reply in time.
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
    """Record the signals that would end this process, and yield the growing list of their numbers.

    SIGHUP stays ignored under nohup.

    Args:
        then: function to call after each signal.
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
    """Server in a process group of its own, with its output in a log.

    Raises:
        ConfigError: the program cannot be started.
    """

    def __init__(self, words: Sequence[str], log: Path, environment: dict[str, str]) -> None:
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
        """Call `wait_for`, with the end of the log in errors."""
        return wait_for(self.process, self.words[0], url, seconds, stopped, self._last)

    def end(self, seconds: float) -> int:
        """Terminate the server, kill its process group after `seconds`, and return its exit code."""
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
    """Run a server until it ends, or until this process gets a signal.

    Args:
        words: command; a word that is a key of `files` is replaced by the path of that file.
        files: contents of temporary files by name.
        port: port of the server, with the path /health.
        times: time limits of the start, and of open requests after a signal, in seconds.

    Returns:
        Exit code of the server; 0 after a signal.

    Raises:
        SametokenError: the server did not start.
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
