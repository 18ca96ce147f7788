"""SIGINT and SIGTERM while a command measures or writes for long: what is done is kept, and it says how to go on.

Each command runs in a process of its own that sends itself the signal at a known moment.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cli_checks import Pair
from fake_server import serving

# The call number AT of FUNCTION in MODULE sends the signal before it runs.
WRAPPER = """
import os, signal, sys
import {module} as module

signal.signal(signal.SIGINT, signal.default_int_handler)  # may be ignored where the tests were started
signal.signal(signal.SIGTERM, signal.SIG_DFL)
owner = {owner}
inner, calls = owner.{function}, 0


def wrapped(*arguments, **named):
    global calls
    calls += 1
    if calls == {at}:
        os.kill(os.getpid(), signal.{number})
    return inner(*arguments, **named)


owner.{function} = wrapped
from sametoken.cli import main

main(sys.argv[1:])
"""
SIGNALS = pytest.mark.parametrize("number", ["SIGINT", pytest.param("SIGTERM", marks=pytest.mark.thorough)])


def stopped(where: str, at: int, number: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command, stopped at that call of module:function or module:Class.function."""
    module, _, path = where.partition(":")
    owner, _, function = path.rpartition(".")
    code = WRAPPER.format(
        module=module, owner=f"module.{owner}" if owner else "module", function=function, at=at, number=number
    )
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=200)


@SIGNALS
def test_bench_keeps_its_whole_rounds(pair: Pair, tmp_path: Path, number: str) -> None:
    words = ("bench", pair.target, "--draft", pair.draft, "--limit", "2", "--output-len", "6", "--repeat", "50",
             "--max-draft-len", "2", "--threads", "1", "--out", str(tmp_path), "--explain")  # fmt: skip
    # Three warm-ups, then rounds of three takes.
    done = stopped("sametoken.bench.run:drive", 3 + 10, number, *words)
    assert done.returncode == 130, done.stderr
    assert "stopped: the figures above are of the rounds that were whole; run the same command" in done.stdout
    (file,) = tmp_path.glob("*.json")
    content = json.loads(file.read_text())
    assert [len(variant["round_s"]) for variant in content["cells"][0]["variants"]] == [3, 3, 3]
    assert any(note.startswith("stopped by a signal") for note in content["notes"])


def test_bench_that_has_no_whole_round_says_so(pair: Pair, tmp_path: Path) -> None:
    done = stopped("sametoken.bench.run:drive", 1, "SIGINT", "bench", pair.target, "--method", "ngram", "--limit", "1")
    assert (done.returncode, done.stdout) == (130, "")
    assert "stopped before a whole round was measured; nothing to show" in done.stderr


@SIGNALS
def test_bench_of_a_server_keeps_its_whole_rounds(tmp_path: Path, number: str) -> None:
    with serving() as (url, _):
        words = ("bench", "--url", url, "--limit", "2", "--repeat", "50", "--out", str(tmp_path))
        done = stopped("sametoken.bench.server:_Place._round", 4, number, *words)
    assert done.returncode == 130, done.stderr
    assert "stopped: the figures above are of the rounds that were whole" in done.stdout
    (file,) = tmp_path.glob("*.json")
    assert [len(load["round_s"]) for load in json.loads(file.read_text())["loads"]] == [3]


@SIGNALS
def test_verify_tells_what_it_compared(pair: Pair, number: str) -> None:
    words = ("verify", pair.target, "--method", "ngram", "--num-prompts", "2", "--max-tokens", "6", "--threads", "1")
    # The reference, then the cases ngram one by one, ngram together; the next temperature begins with its reference.
    done = stopped("sametoken.check.proof:Proof._complete", 4, number, *words)
    assert done.returncode == 130, done.stderr
    assert "stopped, equal so far: " in done.stdout
    assert "tokens in 2 cases of 2 prompts; run the same command for all cases" in done.stdout


@SIGNALS
def test_synthesize_keeps_whole_conversations_and_goes_on(pair: Pair, tmp_path: Path, number: str) -> None:
    data, out = tmp_path / "data.jsonl", tmp_path / "out.jsonl"
    turn = {"role": "user", "content": "hi"}
    data.write_text("".join(json.dumps({"id": n, "messages": [turn]}) + "\n" for n in range(9)))
    words = ("synthesize", pair.target, "--data", str(data), "--output", str(out), "--max-tokens", "5",
             "--num-threads", "1", "--threads", "1")  # fmt: skip
    done = stopped("sametoken.data.synthesize:converse", 4, number, *words)
    assert done.returncode == 128 + getattr(signal, number), done.stderr
    assert "3 conversations written" in done.stdout
    assert "stopped: conversations under way are not written; the same command goes on with them" in done.stderr
    assert len(out.read_text().splitlines()) == 3
    again = subprocess.run([sys.executable, "-m", "sametoken.cli", *words], capture_output=True, text=True, timeout=200)
    assert "6 conversations written" in again.stdout
    assert "3 were there" in again.stdout
