"""Dynamo's frontend with our workers, as deploy/dynamo/launch.sh starts them, and what tests ask of them."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("SAMETOKEN_DYNAMO", "")
LAUNCH = ROOT / "deploy" / "dynamo" / "launch.sh"
PATIENCE_S = 60.0
QUIET = {"HF_HUB_OFFLINE": "1", "DYN_LOG": "info", "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "2"}


def ports(count: int) -> int:
    """The first of so many ports side by side that nobody uses, below 2**15, where Dynamo's system ports end."""
    return next(
        first
        for first in iter(lambda: random.randrange(20_000, 32_000), None)
        if not any(_used(port) for port in range(first, first + count))
    )


def _used(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_until(true: Callable[[], object], log: Path | None = None, seconds: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, log.read_text()[-6000:] if log else "too late"
        time.sleep(0.1)


class Answer(NamedTuple):
    """What a client got of a stream."""

    text: str
    reason: str | None
    tokens: int
    events: int


class Worker(NamedTuple):
    """A worker of the stack."""

    process: int
    port: int

    def metrics(self) -> str:
        return httpx.get(f"http://127.0.0.1:{self.port}/metrics").text

    def value(self, name: str) -> float:
        """The sum of a metric over its labels."""
        return total(self.metrics(), name)

    @property
    def ready(self) -> bool:
        try:
            health = httpx.get(f"http://127.0.0.1:{self.port}/health").json()
        except httpx.TransportError:
            return False
        return bool(health["status"] == "ready" and health["endpoints"].get("generate") == "ready")


def total(text: str, name: str) -> float:
    return sum(float(found) for found in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.M))


class Stack(NamedTuple):
    """A frontend and its workers."""

    url: str
    workers: list[Worker]
    log: Path
    environ: dict[str, str]

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/{path}", json={"model": "embedded", **body}, timeout=PATIENCE_S)

    def stream(self, body: dict[str, Any], at: Callable[[int], object] = lambda events: None) -> Answer:
        """The streamed answer of a chat; `at` is called with the number of every event."""
        text, reason, tokens, events = "", None, 0, 0
        asked = {"model": "embedded", "stream": True, "stream_options": {"include_usage": True}, **body}
        with httpx.stream("POST", f"{self.url}/v1/chat/completions", json=asked, timeout=PATIENCE_S) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                assert "code" not in event, event
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
                for choice in event["choices"]:
                    text += choice["delta"].get("content") or ""
                    reason = choice.get("finish_reason") or reason
                    events += 1
                at(events)
        return Answer(text, reason, tokens, events)

    def busy(self) -> Worker:
        """The worker that computes now."""
        for each in self.workers * 100:
            with suppress(httpx.TransportError):  # one that was ended
                if each.value("sametoken_num_requests_running"):
                    return each
        raise AssertionError("no worker computes")


@contextmanager
def stack(place: Path, workers: int, *options: str, **variables: str) -> Iterator[Stack]:
    """A stack that is ready, and that leaves nothing behind."""
    first = ports(workers + 1)
    environ = {
        **os.environ, **QUIET, "PYTHON": PYTHON, "WORKERS": str(workers), "DYN_HTTP_PORT": str(first + workers),
        "SYSTEM_PORT": str(first), "TMPDIR": str(place), "OMP_NUM_THREADS": "1", **variables,
    }  # fmt: skip
    log = place / f"stack-{first}.log"
    with log.open("w") as out:
        process = subprocess.Popen([LAUNCH, *options], stdout=out, stderr=out, env=environ)
        try:
            wait_until(lambda: "frontend: process" in log.read_text(), log)
            started = re.findall(r"worker \d+: process (\d+), health and metrics on port (\d+)", log.read_text())
            found = Stack(
                f"http://127.0.0.1:{first + workers}", [Worker(*map(int, each)) for each in started], log, environ
            )
            wait_until(lambda: process.poll() is not None or all(each.ready for each in found.workers), log)
            assert process.poll() is None, log.read_text()
            wait_until(lambda: _listed(found), log)
            yield found
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 143, log.read_text()
            assert not any(Path(f"/proc/{each.process}").exists() for each in found.workers)
            assert not list(place.glob("tmp.*")), "the store of file discovery is left behind"
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(PATIENCE_S)


def _listed(found: Stack) -> bool:
    try:
        models = httpx.get(f"{found.url}/v1/models").json()["data"]
    except httpx.TransportError:
        return False
    return [each["id"] for each in models] == ["embedded"]
