"""A child process that answers requests, and the rule that only one of them computes at a time."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from peers_engines.load import free_bytes, usage

ROOT = Path(__file__).parents[1]  # what children import peers_engines from
START_SECONDS = 900.0
ANSWER_SECONDS = 600.0
RESERVE = 5 * 10**9  # bytes that must be free before another engine is loaded


class EngineError(Exception):
    """An engine is absent, could not be built or ended; the message says which and why."""


class Visit(NamedTuple):
    """An answer, how long it took, and the CPU seconds that others used meanwhile."""

    answer: dict[str, Any]
    wall: float
    foreign: float


class Launch(NamedTuple):
    """How to start an engine.

    Attributes:
        python: interpreter; `module`: what it runs, of peers_engines.
        spec: the engine's argument, see the module.
    """

    python: str
    module: str
    spec: Mapping[str, Any]


class Host:
    """One engine in a process of its own, stopped while it is not asked.

    Attributes:
        version: what the engine says of itself.
    """

    def __init__(self, launch: Launch, log: Path) -> None:
        threads = str(launch.spec["threads"])
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = os.environ | {
            "PYTHONPATH": paths,
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self.log = log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [launch.python, "-m", f"peers_engines.{launch.module}", json.dumps(launch.spec)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                start_new_session=True,
            )
        self._pending = b""
        try:
            self.version: str = self._read(START_SECONDS)["version"]
        except EngineError:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def ask(self, request: Mapping[str, Any]) -> Visit:
        """Lets the engine go on, answer and stop again.

        Raises:
            EngineError: it failed, ended or took too long; then it is closed.
        """
        assert self.process.stdin is not None
        self._signal(signal.SIGCONT)
        before, begin = usage(self.process.pid), time.perf_counter()
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
            answer = self._read(ANSWER_SECONDS)
        except (EngineError, BrokenPipeError) as error:
            self.close()
            raise EngineError(f"{error}") from error
        wall = time.perf_counter() - begin
        foreign = usage(self.process.pid).foreign_since(before)
        self._signal(signal.SIGSTOP)
        return Visit(answer, wall, foreign)

    def close(self) -> None:
        """Ends the process and what it started."""
        self._signal(signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def _read(self, seconds: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        pipe, deadline = self.process.stdout.fileno(), time.monotonic() + seconds
        while b"\n" not in self._pending:
            if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise EngineError(f"no answer within {seconds:.0f} s; see {self.log}")
            if not (piece := os.read(pipe, 65536)):
                raise EngineError(f"the process ended with code {self.process.wait()}; see {self.log}")
            self._pending += piece
        line, _, self._pending = self._pending.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineError(str(answer["error"]))
        return answer


class Hosts:
    """Hosts by key, started when first asked and kept running while memory lasts.

    Attributes:
        versions: of every engine that was started, by the first part of its key.
    """

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.running: dict[tuple[str, ...], Host] = {}
        self.versions: dict[str, str] = {}
        logs.mkdir(parents=True, exist_ok=True)

    def ask(
        self, key: tuple[str, ...], launch: Launch, request: Mapping[str, Any], warm_ups: Sequence[Mapping[str, Any]]
    ) -> Visit:
        """A visit of the engine of this key; one just started answers `warm_ups` first.

        Raises:
            EngineError: the engine could not be started or did not answer.
        """
        if key not in self.running:
            self._make_room()
            self.running[key] = Host(launch, self.logs / f"{'-'.join(key)}.log")
            self.versions[key[0]] = self.running[key].version
            for warm_up in warm_ups:
                self._ask(key, warm_up)
        # Last in the dictionary is the one used last, which in a cycle is needed again last of all.
        self.running[key] = self.running.pop(key)
        return self._ask(key, request)

    def _ask(self, key: tuple[str, ...], request: Mapping[str, Any]) -> Visit:
        try:
            return self.running[key].ask(request)
        except EngineError:
            del self.running[key]
            raise

    def _make_room(self) -> None:
        while self.running and free_bytes() < RESERVE:
            key, host = self.running.popitem()
            host.close()
            print(f"  closed {'/'.join(key)} to make room", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Ends all of them."""
        while self.running:
            self.running.popitem()[1].close()
