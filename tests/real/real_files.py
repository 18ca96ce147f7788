"""Where published models are, for the tests of this folder, which are skipped without them."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from real_models import MODELS

REAL = os.environ.get("SAMETOKEN_REAL", "")
needs_models = pytest.mark.skipif(not REAL, reason="needs published models (3.2 GB); run: make test-real")
RECORDED = Path(__file__).with_name("llama_cpp.json")
CACHE_VARIABLE = "SAMETOKEN_WEIGHT_CACHE"
PATIENCE_S = 240.0


def gguf(name: str) -> str:
    """The file of a published model."""
    return str(Path(REAL) / MODELS[name].file)


def bf16(name: str) -> str:
    """The directory in bfloat16 that was made from it."""
    return str(Path(REAL) / MODELS[name].bf16)


def recorded() -> dict[str, Any]:
    """What llama.cpp said, see `record_llama_cpp.py`."""
    return dict(json.loads(RECORDED.read_text(encoding="utf-8")))


class Served(NamedTuple):
    """A server process.

    Attributes:
        url: of the server. `seconds`: from its start until it was ready; `work`: of processor time until then.
    """

    url: str
    process: subprocess.Popen[bytes]
    seconds: float
    work: float


@contextmanager
def served(model: str, *options: str) -> Iterator[Served]:
    """`sametoken serve` of a model with these options, ended with the block."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    begin = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "sametoken.cli", "serve", model, "--port", str(port), *options])
    try:
        while not _ready(url):
            assert process.poll() is None, f"the server ended with {process.returncode}"
            assert time.perf_counter() - begin < PATIENCE_S, "the server is not ready"
            time.sleep(0.02)
        seconds = time.perf_counter() - begin
        yield Served(url, process, seconds, work_of(process.pid))
    finally:
        process.terminate()
        process.wait(60)


def _ready(url: str) -> bool:
    try:
        return httpx.get(url + "/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


class Ran(NamedTuple):
    """A command that has ended.

    Attributes:
        text: its output. `seconds`: that it took; `work`: of processor time. `most`: bytes of memory that it had.
    """

    text: str
    seconds: float
    work: float
    most: int


def run(place: Path, *words: str) -> Ran:
    """Runs a command of ours, with its output in a file of this directory."""
    output, begin, before, most = place / "output.txt", time.perf_counter(), _work_of_children(), 0
    with output.open("w") as opened:
        process = subprocess.Popen([sys.executable, "-m", "sametoken.cli", *words], stdout=opened)
        while process.poll() is None:
            most = max(most, memory(process.pid, "VmHWM"))
            time.sleep(0.02)
    assert process.returncode == 0
    return Ran(output.read_text(), time.perf_counter() - begin, _work_of_children() - before, most)


def _work_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def work_of(process: int) -> float:
    """Seconds of processor time of a process, and of its children that ended."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def memory(process: int, name: str) -> int:
    """Bytes of memory of a process: VmRSS for now, mapped files included, or VmHWM for the most; 0 once it ended."""
    status = Path(f"/proc/{process}/status").read_text()
    return next((int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith(name)), 0)
