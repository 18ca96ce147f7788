"""Measuring servers: tokens are the server's count, failures are named, loads are what was asked for."""

from __future__ import annotations

import asyncio
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from fake_server import PIECES, TOKENS, serving
from sametoken.bench.client import ask
from sametoken.bench.record import read_runs
from sametoken.client.client import Client

BODY = {"messages": [], "stream_options": {"include_usage": True}}
TEXT = "".join(PIECES)


# --- one request


def one(url: str, body: dict[str, Any] = BODY, timeout: float = 0.3, path: str = "chat/completions") -> Any:
    async def go() -> Any:
        async with Client(url, "secret", timeout) as client:
            return await ask(client, path, body, time.perf_counter())

    return asyncio.run(go())


def test_several_tokens_in_a_chunk_are_counted_by_usage() -> None:
    with serving(pause=0.01) as (url, state):
        answer = one(url)
    assert (answer.text, answer.tokens, answer.failure) == (TEXT, TOKENS, None)
    assert len(answer.chunks) == 3
    assert not answer.counted
    assert sum(count for _, count in answer.emissions()) == TOKENS
    assert 0.01 <= answer.ttft < answer.chunks[-1][0] <= answer.latency
    assert (state.paths, state.keys) == (["/v1/chat/completions"], ["Bearer secret"])


def test_a_server_that_counts_in_every_chunk_is_believed() -> None:
    with serving(continuous=True) as (url, _):
        answer = one(url, {**BODY, "stream_options": {"continuous_usage_stats": True}})
        plain = one(url, {"prompt": "a", "stream_options": {}}, path="completions")
    assert answer.counted
    assert [count for _, count in answer.emissions()] == [3, 1, 2]
    assert (plain.text, plain.counted) == (TEXT, False)


FAULTS = {
    "error": "HTTP 503: the engine is full",
    "late_error": "error in the stream: out of pages",
    "stall": "stalled (ReadTimeout)",
    "cut": "connection lost (RemoteProtocolError)",
    "early": "stream ended early",
    "garbage": "not an OpenAI stream (JSONDecodeError)",
    "no_usage": "no usage in the stream",
    "empty": "no tokens",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_goes_wrong_is_named(fault: str) -> None:
    with serving(fault=fault) as (url, _):
        assert one(url).failure == FAULTS[fault]


def test_a_server_that_is_not_there() -> None:
    with serving() as (url, _):
        pass
    assert one(url).failure == "connection lost (ConnectError)"


# --- the command


def bench(run: Any, tmp_path: Path, *arguments: str) -> Any:
    answer = run("bench", *arguments, "--limit", "4", "--repeat", "2", "--out", str(tmp_path / "out"))
    assert answer.code == 0, answer.err
    (found,) = read_runs([str(tmp_path / "out")])
    return found, answer.out


def test_closed_and_open_loads_beside_a_baseline(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from-the-environment")
    with serving() as (fast, state), serving(pause=0.02) as (slow, other):
        found, shown = bench(run, tmp_path, "--url", fast, "--baseline-url", f"{slow}/v1/", "--concurrency", "1,3",
                             "--rate", "50", "--requests", "6", "--explain")  # fmt: skip
    assert [(load.side, load.kind, load.level) for load in found.loads] == [
        (side, kind, level)
        for kind, level in (("closed", 1.0), ("closed", 3.0), ("open", 50.0))
        for side in ("server", "baseline")
    ]
    for load in found.loads:
        assert load.tokens == 2 * 6 * TOKENS
        assert load.failures == {}
        assert (load.speed_up is None, load.equal_texts) == ((True, None) if load.side == "baseline" else (False, 1.0))
    server, baseline = (found.loads[place].round_s for place in (0, 1))
    ratios = [b / a for a, b in zip(server, baseline, strict=True)]  # the tokens are the same
    assert found.loads[0].speed_up.value == pytest.approx(math.sqrt(math.prod(ratios)))
    assert found.basis["inter_token_s"] == "estimated"
    assert state.most <= 6
    assert other.bodies[-1]["model"] == "canned"
    assert len(state.bodies) == 3 * 2 + 3 * 2 * 6  # warm-up, then loads x rounds x requests
    assert set(state.keys) == {"Bearer from-the-environment"}
    assert "concurrency 3" in shown
    assert "~" in shown


def test_no_more_requests_at_once_than_the_concurrency(run: Any, tmp_path: Path) -> None:
    with serving(pause=0.01) as (url, state):
        found, _ = bench(run, tmp_path, "named", "--url", url, "--concurrency", "3")
    assert 1 < state.most <= 3
    assert found.loads[0].requests == 6
    assert {body["model"] for body in state.bodies} == {"named"}
    assert not any("ignore_eos" in body for body in state.bodies)


def test_failed_requests_are_counted_and_the_rest_measured(run: Any, tmp_path: Path) -> None:
    with serving(fault="error", faulty=4) as (url, _):  # the two of the warm-up, and two more
        found, shown = bench(run, tmp_path, "--url", url)
    (load,) = found.loads
    assert load.failures == {"HTTP 503: the engine is full": 2}
    assert load.tokens == (2 * 4 - 2) * TOKENS
    assert "2 x HTTP 503" in shown


def test_counts_in_every_chunk_are_measured(run: Any, tmp_path: Path) -> None:
    with serving(continuous=True) as (url, _):
        found, shown = bench(run, tmp_path, "--url", url, "--continuous-usage")
    assert found.loads[0].inter_token_basis == found.basis["inter_token_s"] == "measured"
    assert "~" not in shown


def test_the_key_is_not_in_the_record(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as (url, _):
        arguments = ["--url", url, "--api-key", "hush-hush"]
        monkeypatch.setattr("sys.argv", ["sametoken", "bench", *arguments, "--api_key=hush-hush"])
        bench(run, tmp_path, *arguments)
    (file,) = (tmp_path / "out").glob("*.json")
    assert "hush" not in file.read_text()
    assert json.loads(file.read_text())["environment"]["command"].count("***") == 2


ERRORS = [
    ("no_usage", (), "tokens cannot be counted"),
    ("error", (), "all 4 requests failed, 4 with: HTTP 503: the engine is full"),
    ("", ("--draft", "x"), "--draft is for measuring an engine in this process"),
    ("", ("--batch", "2"), "--batch is for measuring an engine"),
    ("", ("--rate", "0"), "--rate '0': expected numbers >= 0.001"),
    ("", ("--concurrency", "1,x"), "--concurrency '1,x'"),
    ("", ("--timeout", "0"), "--timeout 0"),
    ("", ("--timeout", "nan"), "--timeout nan"),
]


@pytest.mark.parametrize(("fault", "arguments", "words"), ERRORS)
def test_a_mistake_is_one_line(run: Any, fault: str, arguments: tuple[str, ...], words: str) -> None:
    with serving(fault=fault) as (url, _):
        answer = run("bench", "--url", url, "--limit", "4", *arguments)
    assert answer.code == 2
    assert answer.err.splitlines()[-1].startswith("error: ")
    assert words in answer.err


@pytest.mark.parametrize(("url", "words"), [("ftp://x", "expected a URL such as"), ("http://127.0.0.1:9", "models: ")])
def test_a_url_that_leads_nowhere(run: Any, url: str, words: str) -> None:
    answer = run("bench", "--url", url)
    assert answer.code == 2
    assert words in answer.err


def test_without_httpx_the_command_to_install_it_is_named(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "httpx", None)
    answer = run("bench", "--url", "http://127.0.0.1:9")
    assert answer.code == 2
    assert "pip install 'sametoken[server]'" in answer.err
