"""The client: what it reads of whole and streamed answers, its clocks, which errors pass and which do not."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from itertools import pairwise
from typing import Any

import pytest

from fake_server import PIECES, TOKENS, serving
from sametoken import ConfigError
from sametoken.client.client import Client, Delta, RemoteError, all_together, persist

BODY: dict[str, Any] = {"messages": [], "stream_options": {"include_usage": True}}


def stream(url: str, body: dict[str, Any] = BODY, most: int | None = None) -> list[Delta]:
    async def go() -> list[Delta]:
        found: list[Delta] = []
        async with Client(f"{url}/v1", "secret", 0.3) as client, aclosing(client.stream("completions", body)) as deltas:
            async for delta in deltas:
                found.append(delta)
                if len(found) == most:
                    break
        return found

    return asyncio.run(go())


def test_a_stream_gives_text_counts_and_the_time_of_the_bytes() -> None:
    begin = time.perf_counter()
    with serving(pause=0.02) as (url, state):
        found = stream(url)
    assert "".join(delta.content for delta in found) == "".join(PIECES)
    assert [delta.tokens for delta in found if delta.tokens is not None] == [TOKENS]
    times = [delta.at for delta in found if delta.content]
    assert begin < times[0]
    assert all(b - a > 0.01 for a, b in pairwise(times))
    assert state.bodies[0]["stream"] is True


def test_closing_a_stream_ends_it_without_an_error() -> None:
    with serving(pause=0.02) as (url, _):
        assert [delta.content for delta in stream(url, most=2)] == ["", PIECES[0]]  # the role comes first


STREAM_FAULTS = {
    "error": ("HTTP 503: the engine is full", 503, True),
    "late_error": ("error in the stream: out of pages", None, False),
    "stall": ("stalled (ReadTimeout)", None, True),
    "cut": ("connection lost (RemoteProtocolError)", None, True),
    "early": ("stream ended early", None, True),
    "garbage": ("not an OpenAI stream (JSONDecodeError)", None, False),
}


@pytest.mark.parametrize("fault", STREAM_FAULTS)
def test_every_fault_of_a_stream_is_one_kind_of_error(fault: str) -> None:
    with serving(fault=fault) as (url, _), pytest.raises(RemoteError) as raised:
        stream(url)
    assert (str(raised.value), raised.value.status, raised.value.passing) == STREAM_FAULTS[fault]


def attempts(*errors: RemoteError, retries: int) -> tuple[int, Any]:
    """How many attempts were made, and what came of them."""
    left, made = list(errors), 0

    async def ask() -> str:
        nonlocal made
        made += 1
        if left:
            raise left.pop(0)
        return "answer"

    try:
        return made, asyncio.run(persist(ask, retries, 0.001))
    except RemoteError as error:
        return made, error
    finally:
        assert made <= retries + 1


def test_only_what_may_pass_is_tried_again() -> None:
    busy, wrong = RemoteError("busy", 503, passing=True), RemoteError("wrong", 400)
    assert attempts(busy, busy, retries=2)[1] == "answer"
    assert attempts(busy, busy, retries=1)[1] is busy
    assert attempts(wrong, retries=5)[1] is wrong
    assert attempts(busy, wrong, retries=5)[1] is wrong


@pytest.mark.parametrize("url", ["ftp://x", "localhost:8000", "http://x:y"])
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(ConfigError, match="expected a URL such as"):
        Client(url, None, 1.0)


def test_a_port_that_is_none() -> None:
    with pytest.raises(ConfigError, match="got port 99999, expected at most 65535"):
        Client("http://127.0.0.1:99999", None, 1.0)


def test_a_server_that_is_not_there_lists_no_model() -> None:
    with serving() as (url, _):
        pass

    async def go() -> str:
        async with Client(url, None, 1.0) as client:
            return await client.first_model()

    with pytest.raises(ConfigError, match=r"/v1/models: connection lost .*; expected a running OpenAI-compatible"):
        asyncio.run(go())


def test_the_first_failure_ends_the_others() -> None:
    ended = []

    async def waiting() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("waiting")

    async def failing() -> None:
        await asyncio.sleep(0)
        raise RemoteError("no")

    with pytest.raises(RemoteError, match="no"):
        asyncio.run(all_together([waiting(), failing()]))
    assert ended == ["waiting"]
