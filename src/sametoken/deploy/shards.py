"""Part of one machine in a synthesis: a server on the machine, and the shards of conversations that it answers.

Shards and answers are files that all machines share. A shard is complete when its answers end with the line `FINISHED`.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from sametoken.data.shards import FILE_NAME
from sametoken.data.synthesize import FINISHED
from sametoken.deploy.start import Child, end_with_parent, noted_signals
from sametoken.errors import ConfigError, SametokenError
from sametoken.files import make_directory

ANSWERS = "output-{0:05d}-{0:05d}.jsonl"
LOGS = "logs"  # folder in the directory of the answers
SERVER_STOP_S, ANSWERS_STOP_S = 30.0, 60.0  # seconds between SIGTERM and SIGKILL
TAIL = 64  # bytes; longer than the line `FINISHED`
PROGRAM = (sys.executable, "-m", "sametoken.cli")
Tell = Callable[[str], object]


class ShardWork(NamedTuple):
    """Settings of a synthesis, equal on all machines.

    Attributes:
        data: directory of the shards.
        output: directory of the answers.
        serve: arguments of `sametoken serve`, without address and port.
        synthesize: arguments of `sametoken synthesize`, without server and files.
        port: port of the server; 0 selects a free one.
        startup: time limit of the server's start, in seconds.
    """

    data: Path
    output: Path
    serve: tuple[str, ...]
    synthesize: tuple[str, ...] = ()
    port: int = 0
    startup: float = 600.0

    def shard(self, number: int) -> Path:
        """File of the conversations of a shard."""
        return self.data / FILE_NAME.format(number)

    def answers(self, number: int) -> Path:
        """File of the answered conversations of a shard."""
        return self.output / ANSWERS.format(number)

    def left(self, numbers: Sequence[int], tell: Tell = lambda line: None) -> list[int]:
        """Numbers of the shards that exist and are not complete."""
        there = [number for number in numbers if self.shard(number).is_file()]
        if missing := [number for number in numbers if number not in there]:
            tell(f"{self.shard(missing[0])} is not there: {len(missing)} of {len(numbers)} shards are left out")
        left = [number for number in there if not done(self.answers(number))]
        if len(left) < len(there):
            tell(f"{len(there) - len(left)} shards were done before")
        return left


def done(answers: Path) -> bool:
    """True if a shard's answers are complete."""
    with suppress(FileNotFoundError), answers.open("rb") as stream:
        stream.seek(max(0, answers.stat().st_size - TAIL))
        return stream.read().splitlines()[-1:] == [json.dumps(FINISHED).encode()]
    return False


class ShardServer:
    """Server on this machine that answers shards until it is closed.

    Args:
        stopped: function that returns True to end the start of the server or the shard in progress.

    Raises:
        ConfigError: the port is in use.
        SametokenError: the server ended, or did not start in time.
    """

    def __init__(self, work: ShardWork, tell: Tell, stopped: Callable[[], bool] = lambda: False) -> None:
        self._work, self._stopped = work, stopped
        port, host = _free_port(work.port), os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        self.url = f"http://127.0.0.1:{port}"
        make_directory(work.output / LOGS)
        log = work.output / LOGS / f"server-{host}-{port}.log"
        words = [*PROGRAM, "serve", *work.serve, "--host", "127.0.0.1", "--port", str(port)]
        tell(f"starting a server; its output goes to {log}")
        self._child = Child(words, log, dict(os.environ))
        try:
            if self._child.wait_for(f"{self.url}/health", work.startup, stopped):
                tell(f"{self.url} answers")
        except BaseException:
            self.close()
            raise

    def answer(self, number: int) -> int:
        """Answer a shard; return the exit code of `sametoken synthesize`.

        Raises:
            SametokenError: the server has ended.
        """
        files = ["--data", str(self._work.shard(number)), "--output", str(self._work.answers(number))]
        words = [*PROGRAM, "synthesize", "--url", self.url, *files, "--log-empty-conversations", *self._work.synthesize]
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, preexec_fn=end_with_parent())
        try:
            while process.poll() is None and not self._stopped() and self._child.process.poll() is None:
                time.sleep(0.05)
        finally:
            if process.poll() is None:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(ANSWERS_STOP_S)
            process.kill()
            process.wait()
        if (code := self._child.process.poll()) is not None:
            raise SametokenError(f"the server ended with exit code {code}; see the end of {self._child.log}")
        return process.returncode

    def close(self) -> None:
        """End the server."""
        self._child.end(SERVER_STOP_S)


def answer_shards(work: ShardWork, numbers: Sequence[int], tell: Tell) -> int:
    """Answer the shards that are not complete, in order.

    Returns:
        0 if all are complete, 128 plus the number of a signal that ended the work, else the first exit code of
        `sametoken synthesize` that is not 0.

    Raises:
        SametokenError: the server did not start, or ended.
    """
    left = work.left(numbers, tell)
    if not left:
        tell("nothing is left to answer")
        return 0
    with noted_signals() as signals:
        server = ShardServer(work, tell, lambda: bool(signals))
        codes: list[int] = []
        try:
            for number in left:
                if signals:
                    break
                codes.append(server.answer(number))
        finally:
            server.close()
    failed = [code for code in codes if code]
    tell(f"{len(codes) - len(failed)} of {len(left)} shards are done now")
    return 128 + signals[0] if signals else next(iter(failed), 0)


def _free_port(wanted: int) -> int:
    """Port `wanted`, or a free port if that is 0. Raises ConfigError if the port is in use."""
    try:
        with socket.create_server(("127.0.0.1", wanted)) as probe:
            return int(probe.getsockname()[1])
    except OSError as error:
        raise ConfigError(
            f"port {wanted} of {socket.gethostname()} cannot be used: {error.strerror}; set another --port, or 0 for a "
            "free one"
        ) from error
