"""How requests end that do not simply finish: clients that leave, full queues, timeouts, and the server's own end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cli_checks import Pair
from sametoken import LLM
from sametoken.checkpoint.tokenizer import LONG_TEXT, Tokenizer
from sametoken.errors import EngineError
from sametoken.options.server import ServerConfig
from sametoken.server.listen import bind
from sametoken.server.run import serve
from sametoken.server.threads import MOST
from server_checks import MODEL, Gate, Running, running, wait_until

LONG = {"prompt": "abc", "max_tokens": 100, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def llm(tiny_pair: Pair, one_thread: None) -> LLM:
    return LLM(tiny_pair.target, max_batch_size=1)


def events(response: httpx.Response) -> list[Any]:
    """The data of a finished stream."""
    parts = [part.removeprefix("data: ") for part in response.text.split("\n\n") if part]
    return [part if part == "[DONE]" else json.loads(part) for part in parts]


class Asking(threading.Thread):
    """A request under way."""

    def __init__(self, server: Running, body: dict[str, Any]) -> None:
        super().__init__()
        self._server, self._body = server, body
        self.answer: httpx.Response | None = None
        self.start()

    def run(self) -> None:
        self.answer = self._server.post("/v1/completions", self._body)

    def result(self) -> httpx.Response:
        self.join(60)
        assert self.answer is not None
        return self.answer


def nothing_left(server: Running) -> bool:
    load = server.llm.engine.load
    return (load.running, load.waiting, load.pages_used) == (0, 0, 0)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_noticed_without_a_step_and_cancelled_before_the_next(llm: LLM, stream: bool) -> None:
    with running(llm) as server:
        gate = Gate(llm)
        worker = server.server.worker
        with httpx.Client(timeout=60) as client:
            if stream:
                gate.let(2)  # the first token of the answer, and one more step that begins before the client leaves
                with client.stream("POST", server.url + "/v1/completions", json={**LONG, "stream": True}) as response:
                    next(response.iter_lines())
            else:
                with pytest.raises(httpx.ReadTimeout):
                    client.post(server.url + "/v1/completions", json=LONG, timeout=0.3)
            wait_until(lambda: worker.totals().prompt_tokens > 0 and not worker._jobs)
        steps = gate.steps
        gate.open()
        wait_until(lambda: nothing_left(server))
        assert gate.steps <= steps + 2
        assert worker.totals().generated <= 3


def test_load_counts_the_requests_that_are_open(llm: LLM) -> None:
    with running(llm) as server:
        gate = Gate(llm)
        asking = [Asking(server, LONG) for _ in range(3)]
        wait_until(lambda: server.get("/load").json() == {"server_load": 3})
        gate.open()
        assert [each.result().status_code for each in asking] == [200] * 3
        assert server.get("/load").json() == {"server_load": 0}


def test_a_full_queue_is_a_429_that_says_when_to_come_back(llm: LLM) -> None:
    with running(llm, max_queue=1) as server:
        gate = Gate(llm)
        asking = [Asking(server, {**LONG, "max_tokens": 3}) for _ in range(2)]
        wait_until(lambda: len(server.server.worker._jobs) == 2)
        refused = server.post("/v1/completions", LONG)
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.json()["error"]["code"] == "queue_full"
        gate.open()
        assert [each.result().status_code for each in asking] == [200, 200]
        assert server.post("/v1/completions", {**LONG, "max_tokens": 3}).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_takes_too_long_is_given_up(llm: LLM, stream: bool) -> None:
    with running(llm, request_timeout=0.2) as server:
        gate = Gate(llm)
        answer = server.post("/v1/completions", {**LONG, "stream": stream})
        if stream:
            *_, said, done = events(answer)
            assert done == "[DONE]"
            error = said["error"]
        else:
            assert answer.status_code == 408
            error = answer.json()["error"]
        assert error["code"] == "timeout"
        assert "0.2 s" in error["message"]
        gate.open()
        wait_until(lambda: nothing_left(server))
        errors = 'sametoken_request_errors_total{code="timeout",model_name="tiny",status="408"} 1.0'
        assert errors in server.get("/metrics").text


def test_stopping_ends_open_streams_with_an_error_and_refuses_new_requests(llm: LLM) -> None:
    with running(llm, drain_seconds=60) as server:
        gate = Gate(llm)
        stream, whole = Asking(server, {**LONG, "stream": True}), Asking(server, LONG)
        wait_until(lambda: len(server.server.worker._jobs) == 2)
        server.stop()
        wait_until(lambda: server.get("/health").status_code == 503)
        refused = server.post("/v1/completions", LONG)
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert server.get("/live").status_code == 200
        server.stop()  # the second signal does not wait
        gate.open()
        *_, said, done = events(stream.result())
        assert said["error"]["code"] == "server_stopped"
        assert done == "[DONE]"
        assert whole.result().status_code == 503
        assert whole.result().json()["error"]["code"] == "server_stopped"


def test_no_text_that_is_being_tokenised_holds_up_the_end(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sametoken.server.listen.LAST_WORDS_S", 0.2)
    begun, done, encode = threading.Semaphore(0), threading.Event(), Tokenizer.encode

    def slow(tokenizer: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        begun.release()
        assert done.wait(60)
        return encode(tokenizer, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", slow)
    try:
        with running(llm) as server:
            body = {**LONG, "user": "u" * LONG_TEXT}  # long enough for a thread of its own
            asked = [Asking(server, body) for _ in range(2 * MOST)]
            assert begun.acquire(timeout=30)
            wait_until(lambda: len(server.server.server_state.tasks) == len(asked))
            server.stop()
            told = [each.result() for each in asked]
    finally:
        done.set()
    assert {answer.status_code for answer in told} == {503}
    assert {answer.json()["error"]["code"] for answer in told} == {"server_stopping"}


def test_a_client_within_its_body_hears_that_the_server_ends(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sametoken.server.listen.LAST_WORDS_S", 0.2)
    with running(llm) as server:
        address = server.url.removeprefix("http://").split(":")
        with socket.create_connection((address[0], int(address[1])), timeout=30) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
            wait_until(lambda: len(server.server.server_state.tasks) == 1)
            server.stop()
            answer = client.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 503")
    assert b'"code":"server_stopping"' in answer


def test_draining_lets_open_requests_finish(llm: LLM) -> None:
    with running(llm, drain_seconds=60) as server:
        gate = Gate(llm)
        stream = Asking(server, {**LONG, "stream": True, "max_tokens": 20})
        wait_until(lambda: len(server.server.worker._jobs) == 1)
        server.stop()
        wait_until(lambda: server.server.worker.draining)
        gate.open()
        last = events(stream.result())[-2]
        assert last["choices"][0]["finish_reason"] == "length"


def test_an_engine_that_fails_is_told_to_everyone_and_the_server_ends(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: None)  # the thread's own words

    def broken() -> Any:
        raise RuntimeError("the model is gone")

    with running(llm) as server:
        gate = Gate(llm)
        asked = [Asking(server, LONG), Asking(server, {**LONG, "stream": True})]
        wait_until(lambda: len(server.server.worker._jobs) == 2)
        monkeypatch.setattr(gate, "_step", broken)
        gate.open()
        assert asked[0].result().status_code == 500
        for told in (asked[0].result().json(), events(asked[1].result())[-2]):
            assert told["error"]["code"] == "engine_failed"
            assert "RuntimeError: the model is gone" in told["error"]["message"]
        wait_until(lambda: server.server.should_exit)
    assert isinstance(server.server.worker.engine.failure, EngineError)
    with pytest.raises(EngineError, match="the model is gone; start a new one"):
        asyncio.run(server.server.worker.engine.generate([[1]]))


def test_the_command_says_that_its_engine_failed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever started it sees it end with an error, and may start it anew."""
    monkeypatch.setattr(threading, "excepthook", lambda args: None)

    def broken() -> Any:
        raise MemoryError("no page left")

    async def ask() -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            await client.post(f"http://127.0.0.1:{bound[0].getsockname()[1]}/v1/completions", json=LONG)

    def started(message: str, *words: Any) -> None:
        if message.startswith("ready"):
            llm.engine.step = broken  # type: ignore[method-assign]
            asking.append(asyncio.ensure_future(ask()))

    config, asking = ServerConfig(port=0), list[Any]()
    monkeypatch.setattr("sametoken.server.run.LOG.info", started)
    with bind(config) as bound, pytest.raises(EngineError, match="MemoryError: no page left"):
        serve(llm, bound, config, {"model": MODEL})


# --- as a process


@pytest.fixture
def process(tiny_pair: Pair, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    log = tmp_path / "log"
    with log.open("w") as out:
        command = [sys.executable, "-m", "sametoken.cli", "serve", tiny_pair.target, "--port", "0", "--threads", "1"]
        started = subprocess.Popen(
            [*command, "--api-key", "one", "--drain-seconds", "60"],
            stderr=out, text=True, env={**os.environ, "SAMETOKEN_API_KEY": "two,three"},
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # ignored where tests run under nohup
        )  # fmt: skip
    said = re.compile(r"ready: (\S+),")
    # Slow where other processes want the processor: it imports torch.
    wait_until(lambda: said.search(log.read_text()) is not None or started.poll() is not None, 180)
    try:
        found = said.search(log.read_text())
        assert found is not None, log.read_text()
        yield started, found[1]
    finally:
        started.kill()
        started.wait()


@pytest.mark.parametrize(
    "way", [signal.SIGTERM, signal.SIGUSR1, pytest.param(signal.SIGHUP, marks=pytest.mark.thorough)]
)
def test_the_command_serves_and_a_signal_ends_it_cleanly(
    process: tuple[subprocess.Popen[str], str], way: signal.Signals
) -> None:
    started, url = process
    for key in ("one", "two", "three"):
        headers = {"Authorization": f"Bearer {key}"}
        answer = httpx.post(url + "/v1/completions", json={"prompt": "a", "max_tokens": 2}, headers=headers, timeout=60)
        assert answer.status_code == 200
    info = httpx.get(url + "/server_info", headers=headers, timeout=60).text
    assert '"api_key":3' in info
    assert "three" not in info
    started.send_signal(way)
    assert started.wait(120) == 0


def test_a_port_in_use_is_an_error_before_the_model_is_loaded(run: Any, llm: LLM) -> None:
    with running(llm) as server:
        answer = run("serve", "/nowhere", "--port", server.url.rpartition(":")[2])
    assert answer.code == 2
    assert "cannot listen on 127.0.0.1 port" in answer.err
