"""A rank that dies, hangs or never comes: the others end in time with an error that names it, and nothing is left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from cli_checks import Pair
from engine_checks import make_llm
from sametoken import LLM, SamplingParams
from sametoken.errors import EngineError
from sametoken.kernels.cpu.variant import library
from sametoken.parallel.gloo import Gloo
from sametoken.parallel.shared import MEMORY_SWITCH, SharedMemory
from server_checks import wait_until

LONG = SamplingParams(max_tokens=80, temperature=0, ignore_eos=True)
ENDS_S = 10.0  # after a rank is gone
READY = re.compile(r"ready: (http://\S+?),")


def is_running(process: int) -> bool:
    """Whether a process is there and not merely waits for its parent to take notice of its end."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("number", "memory", "words"),
    [
        (signal.SIGKILL, "on", r"rank 1 of 2 has ended by signal 9"),
        pytest.param(signal.SIGKILL, "off", r"rank 1 of 2 has ended by signal 9", marks=pytest.mark.thorough),
        (signal.SIGSTOP, "on", r"rank 1 of 2 has given no sign"),
    ],
)
def test_a_rank_that_dies_or_hangs_is_named(
    pair: Pair, number: int, memory: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one host with the memory that ranks share, and as between hosts; a rank that hangs there: see distributed."""
    monkeypatch.setenv(MEMORY_SWITCH, memory)
    llm = make_llm(pair.target, tensor_parallel_size=2, dtype="bfloat16")
    assert llm.ranks is not None
    assert isinstance(llm.ranks.group.transport, SharedMemory if memory == "on" and library() else Gloo)
    other = llm.ranks.processes[1]
    llm.generate([[5, 6, 7]] * 4, LONG)
    begin = time.monotonic()
    os.kill(other.pid, number)
    with pytest.raises(EngineError, match=words):
        generate_for_ever(llm)
    assert time.monotonic() - begin < ENDS_S
    llm.ranks.close()
    assert not is_running(other.pid)


def generate_for_ever(llm: LLM) -> None:
    while True:
        llm.generate([[5, 6, 7]] * 4, LONG)


@contextmanager
def served(pair: Pair, *options: str) -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    """A server of two ranks as a process of its own: the process, its URL, and the process of rank 1."""
    command = [sys.executable, "-m", "sametoken.cli", "serve", pair.target, "--tp_size", "2", "--port", "0", *options]
    server = subprocess.Popen(command, text=True, stderr=subprocess.PIPE)
    try:
        assert server.stderr is not None
        url = next(found[1] for line in server.stderr if (found := READY.search(line)))
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        (rank,) = (int(pid) for pid in children if b"sametoken.parallel" in Path(f"/proc/{pid}/cmdline").read_bytes())
        yield server, url, rank
    finally:
        server.kill()
        server.communicate()


def test_open_streams_of_a_server_get_an_error_when_a_rank_dies(pair: Pair) -> None:
    with served(pair) as (server, url, rank):
        body = {"prompt": "ab", "max_tokens": 100, "ignore_eos": True, "stream": True, "n": 8, "temperature": 1}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as answer:
            events = (line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: "))
            next(events)
            os.kill(rank, signal.SIGKILL)
            found = [json.loads(event) for event in events if "error" in event]
        assert "rank 1 of 2 has ended by signal 9" in found[-1]["error"]["message"]
        assert server.wait(ENDS_S) == 2


@pytest.mark.thorough
def test_an_idle_server_ends_when_a_rank_dies(pair: Pair) -> None:
    with served(pair) as (server, _, rank):
        os.kill(rank, signal.SIGKILL)
        assert server.wait(ENDS_S) == 2
        assert server.stderr is not None
        assert "rank 1 of 2 has ended by signal 9" in server.stderr.read()


def test_a_server_of_two_ranks_drains_at_sigterm_and_leaves_nobody(pair: Pair) -> None:
    with served(pair) as (server, url, rank):
        body = {"prompt": "ab", "max_tokens": 60, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as answer:
            events = (line for line in answer.iter_lines() if line.startswith("data: "))
            next(events)
            os.kill(rank, signal.SIGTERM)  # as a launcher does, which sends it to all
            server.send_signal(signal.SIGTERM)
            assert list(events)[-1] == "data: [DONE]"
        assert server.wait(30) == 0
        assert not is_running(rank)


@pytest.mark.thorough
def test_no_rank_outlives_rank_0(pair: Pair) -> None:
    with served(pair) as (server, _, rank):
        server.kill()
        wait_until(lambda: not is_running(rank), ENDS_S)
