"""What the front does with the answers of replicas, which are small servers of this test."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from sametoken.errors import EngineError
from sametoken.options.server import ServerConfig
from sametoken.replicas import front
from sametoken.replicas.front import Front
from sametoken.replicas.process import Replica, Work
from sametoken.replicas.replicas import Replicas
from sametoken.replicas.routing import PrefixMemory, RoutedPrompt, prompt_of
from sametoken.server.errors import reply, stopping

TEXT = "/v1/completions"
Answer = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


def http(status: int, body: bytes, kind: str = "application/json", length: int | None = None) -> bytes:
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body) if length is None else length}"
    return head.encode() + b"\r\n\r\n" + body


def says(answer: bytes) -> Answer:
    async def write(request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)

    return write


def ask_front(
    tmp_path: Path,
    answers: list[Answer],
    ask: Callable[[httpx.AsyncClient], Awaitable[httpx.Response]],
    **options: Any,
) -> tuple[httpx.Response, list[bytes], Replicas]:
    """The answer of a front; what its replicas got."""
    got: list[bytes] = []
    config = ServerConfig(**options)

    async def run() -> tuple[httpx.Response, list[bytes], Replicas]:
        works = [Work(None, number, str(tmp_path / str(number)), config, {}) for number in range(len(answers))]  # type: ignore[arg-type]
        replicas = Replicas(works, 0.0)
        servers = []
        handled: list[Any] = []
        for replica, answer in zip(replicas._all, answers, strict=True):

            async def serve(
                reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: Answer = answer
            ) -> None:
                handled.append(asyncio.current_task())
                got.append(await reader.read(2**16))
                await answer(got[-1], writer)
                writer.close()
                with suppress(OSError):  # the front has gone
                    await writer.wait_closed()

            servers.append(await asyncio.start_unix_server(serve, replica.socket))
            replica.status = "ready"
            replica._memory = PrefixMemory(1000)
        transport = httpx.ASGITransport(Front(replicas, config))
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
            answered = await ask(client)
        for server in servers:
            server.close()
        await asyncio.gather(*handled)
        return answered, got, replicas

    return asyncio.run(run())


@pytest.mark.parametrize("path", [TEXT, "/v1/messages"])
def test_a_request_that_an_ending_replica_refuses_goes_to_another(tmp_path: Path, path: str) -> None:
    body = {"prompt": "a" * 1000}
    ending = says(http(503, bytes(reply(stopping(), path).body)))
    found, got, replicas = ask_front(
        tmp_path, [ending, says(http(200, b'"here"'))], lambda client: client.post(path, json=body)
    )
    assert (found.status_code, found.json()) == (200, "here")
    assert len(got) == 2
    assert got[0] == got[1]
    prompt = prompt_of(found.request.content) if path == TEXT else RoutedPrompt()
    assert [each.candidate(prompt).known > 0 for each in replicas._all] == [False, path == TEXT]
    other = says(http(503, b'{"error": "busy"}'))
    found, got, _ = ask_front(tmp_path, [other, other], lambda client: client.post(path, json=body))
    assert (found.status_code, found.json()) == (503, {"error": "busy"})
    assert len(got) == 1


def test_the_body_of_a_request_without_a_key_is_not_read(tmp_path: Path) -> None:
    reads = []

    async def body() -> Any:
        reads.append(1)
        yield b"{}"

    def ask(key: str) -> Callable[[httpx.AsyncClient], Awaitable[httpx.Response]]:
        # ASGITransport reads what it is given only when the application receives it.
        return lambda client: client.post(TEXT, content=body(), headers={"Authorization": f"Bearer {key}"})

    replica = says(http(401, b"{}"))
    found, got, _ = ask_front(tmp_path, [replica], ask("two"), api_key=("one",))
    assert found.status_code == 401
    assert got[0].endswith(b"content-length: 0\r\n\r\n")
    _, got, _ = ask_front(tmp_path, [replica], ask("one"), api_key=("one",))
    assert got[0].endswith(b"content-length: 2\r\n\r\n{}")


def test_a_lost_stream_ends_with_whole_events(tmp_path: Path) -> None:
    async def lost(request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(http(200, b"data: 1\n", "text/event-stream", 1000))
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.write(b'\ndata: 2\n\ndata: {"unfin')

    found, *_ = ask_front(tmp_path, [lost], lambda client: client.post(TEXT, json={}))
    events = found.text.split("\n\n")
    assert events[:2] == ["data: 1", "data: 2"]
    assert "ended before the answer was complete" in events[2]
    assert events[3:] == ["data: [DONE]", ""]


def test_a_slow_replica_delays_what_all_say_for_a_bounded_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def slow(request: bytes, writer: asyncio.StreamWriter) -> None:
        answer = http(200, b'{"server_load": 9}')
        await asyncio.sleep(0.4)
        writer.write(answer[:-1])
        await asyncio.sleep(0.4)
        writer.write(answer[-1:])

    monkeypatch.setattr(front, "ASK_S", 0.6)
    quick = says(http(200, b'{"server_load": 3}'))
    found, *_ = ask_front(tmp_path, [slow, quick], lambda client: client.get("/load"))
    assert found.json() == {"server_load": 3}


def test_answers_of_the_front_are_for_pages_of_other_origins_too(tmp_path: Path) -> None:
    origin = {"Origin": "https://page"}
    for path in ("/health", TEXT):  # there is no replica

        async def ask(client: httpx.AsyncClient, path: str = path) -> httpx.Response:
            return await client.get(path, headers=origin)

        found, *_ = ask_front(tmp_path, [], ask, cors_origin=("https://page",))
        assert found.status_code == 503
        assert found.headers["access-control-allow-origin"] == "https://page"
        assert found.headers["x-request-id"]


def test_a_process_that_says_no_json_is_killed_and_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def begin() -> str:
        replica = Replica(Work(int, 0, "", ServerConfig(), {}))  # type: ignore[arg-type]
        with pytest.raises(EngineError, match="replica 0 cannot be started"):
            await replica.start()
        assert replica.status == "ended"
        return await asyncio.wait_for(replica.ended(), 10)

    program = tmp_path / "python"
    for said in ("no", "[1]"):
        program.write_text(f"#!/bin/sh\necho '{said}'\nexec sleep 60\n")
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))
        assert asyncio.run(begin()) == "replica 0 has ended by signal 9"


def test_a_process_does_not_import_from_the_current_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\nprintf \'{"error": "%s"}\\n\' "$*"\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))

    async def begin() -> None:
        replica = Replica(Work(int, 0, "", ServerConfig(), {}))  # type: ignore[arg-type]
        with pytest.raises(EngineError, match=r"^-P -m sametoken\.replicas$"):
            await replica.start()
        await replica.close()

    asyncio.run(begin())
