"""Raw bytes against the server: whatever is sent, it answers with a refusal in OpenAI's envelope and serves on."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cli_checks import Pair
from sametoken import LLM
from sametoken.server import connection
from server_checks import Gate, Running, running, wait_until

EXAMPLES = int(os.environ.get("SAMETOKEN_EXAMPLES", "40"))
MOST = 200_000  # bytes of a body
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TINY = {"prompt": "a", "max_tokens": 2}
SENT = json.dumps(TINY).encode()
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "prompt": ["ab", "c"], "max_tokens": 2, "n": 2, "temperature": 0.5, "stop": ["x"], "logit_bias": {"5": -3},
        "stream": True, "stream_options": {"include_usage": True}, "speculative": {"report": True}, "seed": 3,
    },
    "/v1/chat/completions": {**CHAT, "response_format": {"type": "regex", "regex": "[a-c]*"}, "logprobs": True},
    "/v1/responses": {"input": [{"role": "user", "content": "hi"}], "max_output_tokens": 2, "metadata": {"a": "b"}},
    "/tokenize": {"prompt": "abc", "return_token_strs": True},
    "/detokenize": {"tokens": [5, 6, 7]},
}  # fmt: skip


@pytest.fixture(scope="module")
def heard() -> Iterator[list[logging.LogRecord]]:
    """What the server and what it stands on log as errors."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = records.append  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in ("sametoken", "uvicorn.error", "asyncio")]
    for logger in loggers:
        logger.addHandler(handler)
    yield records
    for logger in loggers:
        logger.removeHandler(handler)


@pytest.fixture(scope="module")
def served(tiny_pair: Pair, one_thread: None, heard: list[logging.LogRecord]) -> Iterator[Running]:
    llm = LLM(tiny_pair.target, tiny_pair.draft, {"max_draft_len": 2, "adaptive": False}, max_batch_size=4)
    with running(llm, max_queue=4, max_body=MOST) as server:
        yield server


def check(response: httpx.Response) -> int:
    """The status of an answer that is no failure of the server's; a refusal has the envelope."""
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        error = response.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert 0 < len(error["message"]) < 2000
        assert response.headers["content-type"] == "application/json"
    elif response.headers["content-type"].startswith("text/event-stream"):
        events = [part.partition("data: ")[2] for part in response.text.split("\n\n") if part]
        assert events[-1] == "[DONE]"
        assert all("error" not in json.loads(event) or not json.loads(event)["error"] for event in events[:-1])
    return response.status_code


# --- bodies


@st.composite
def broken(draw: st.DrawFn) -> tuple[str, bytes]:
    """A good body with pieces cut, doubled, moved and overwritten."""
    path = draw(st.sampled_from(sorted(GOOD)))
    body = json.dumps(GOOD[path]).encode()
    for _ in range(draw(st.integers(1, 3))):
        begin, end = sorted((draw(st.integers(0, len(body))), draw(st.integers(0, len(body)))))
        other = draw(st.sampled_from(PIECES) | st.binary(max_size=4) | st.just(body[begin:end] * 2))
        body = body[:begin] + other + (body[end:] if end - begin < 30 else body[begin:])
    return path, body


PIECES = (
    b"", b"null", b"-1", b"1e999", b"NaN", b"-Infinity", b"1" * 400, b"-0", b'""', b"[]", b"{}", b"true", b'"\\ud800"',
    b'"\\u0000"', b"\xff\xfe", b"\xed\xa0\x80", b'{"a":', b"[[", b",", b'"n": 4, ', b"\\", b"//", b"0x1F", b"1.5",
)  # fmt: skip


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(broken())
def test_broken_bodies_are_answered(served: Running, sent: tuple[str, bytes]) -> None:
    check(served.client.post(sent[0], content=sent[1]))


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(sorted(GOOD)), st.binary(max_size=200))
def test_random_bytes_are_refused(served: Running, path: str, body: bytes) -> None:
    assert check(served.client.post(path, content=body)) == 400


def nested(depth: int) -> dict[str, Any]:
    """A schema of objects within objects."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def offers(parameters: dict[str, Any]) -> dict[str, Any]:
    """A function that must be called."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    return {**CHAT, "tools": tools, "tool_choice": "required"}


def called(arguments: str) -> dict[str, Any]:
    """A conversation with a call in it."""
    call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    return {**CHAT, "messages": [*CHAT["messages"], {"role": "assistant", "tool_calls": [call]}]}


DOUBLING = "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(60))

STEPS = "".join(f"a{i}: /a/ a{i + 1} | /c/\n" for i in range(4000))
REFERENCES: dict[str, Any] = {f"{i}": {"$ref": f"#/$defs/{i + 1}"} for i in range(3000)} | {"3000": {"type": "null"}}


def form(**asked: Any) -> dict[str, Any]:
    return {**TINY, "structured_outputs": asked}


TOKENIZED = {"messages", "chat_template_kwargs"}
WORSE: dict[str, dict[str, Any]] = {
    "a huge n": {"prompt": "a", "n": 2**63},
    "more sequences than there is place for": {"prompt": "a", "n": 128},
    "a negative length": {"prompt": "a", "max_tokens": -(2**70)},
    "ten thousand stop strings": {"prompt": "a", "stop": [f"s{i}" for i in range(10_000)]},
    "ten thousand biases": {"prompt": "a", "logit_bias": {str(i): 1 for i in range(10_000)}},
    "a bias of a token that is none": {"prompt": "a", "logit_bias": {"-1": 1}},
    "a token beyond any vocabulary": {"prompt": [2**62]},
    "ten thousand empty token lists": {"prompt": [[]] * 10_000},
    "a deep schema": form(json=nested(200)),
    "a schema that never ends": form(json={"$ref": "#"}),
    "a schema that asks for itself": form(json={"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    "a schema from elsewhere": form(json={"$ref": "http://localhost/none.json"}),
    "a schema that nothing fulfils": form(json={"type": "integer", "minimum": 5, "maximum": 1}),
    "a pattern that explodes": form(json={"type": "string", "pattern": "(a{1,1000}){1,1000}"}),
    "a regular expression that explodes": form(regex="((a{1,500}){1,500}){1,500}"),
    "one that explodes backwards": form(regex="(x+x+)+y" * 2000),
    "one with a look behind": form(regex="(?<=a)b"),
    "an open bracket": form(regex="["),
    "a bracket ten thousand deep": form(regex="(" * 10_000 + ")" * 10_000),
    "a grammar that begins with itself": form(grammar="start: start"),
    "a grammar without a beginning": form(grammar="a: a a a"),
    "a grammar that doubles": form(grammar=f"start: a0\n{DOUBLING}a60: /b/"),
    "fifteen thousand choices": form(choice=[f"{i}" for i in range(15_000)]),
    "a grammar of four thousand steps": form(grammar=f"start: a0\n{STEPS}a4000: /b/"),
    "a schema of three thousand references": form(json={"$defs": REFERENCES, "$ref": "#/$defs/0"}),
    "a form that is too long": form(choice=["a b " * 40_000]),
    "an unknown form": form(magic=1),
    "a grammar in a schema's place": form(json="start: /a/"),
    "functions that explode": offers({"pattern": "(a{1,999}){1,999}", "type": "string"}),
    "a thousand functions": {**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}] * 1000},
    "a message of many parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 5000}]},
    "arguments that are no JSON": called("[" * 50_000),
    "a template told what it is told anyway": {**CHAT, "chat_template_kwargs": {"add_generation_prompt": False}},
    "a template's words of any kind": {**CHAT, "chat_template_kwargs": {"self": 1, "": [], "text": {}}},
    "a prediction that is too long": {**TINY, "prediction": {"type": "content", "content": "b" * 150_000}},
}  # fmt: skip


@pytest.mark.parametrize("case", WORSE)
def test_a_request_that_asks_too_much_is_answered(served: Running, case: str) -> None:
    path = "/v1/chat/completions" if "messages" in WORSE[case] else "/v1/completions"
    check(served.post(path, WORSE[case]))
    if path.startswith("/v1/chat"):
        check(served.post("/tokenize", {key: WORSE[case][key] for key in WORSE[case].keys() & TOKENIZED}))


HEADERS: dict[str, tuple[dict[str, str], bytes, int]] = {
    "no content type": ({}, SENT, 200),
    "what curl says by itself": ({"Content-Type": "application/x-www-form-urlencoded"}, SENT, 415),
    "a form": ({"Content-Type": "multipart/form-data; boundary=x"}, b"--x\r\n\r\na\r\n--x--", 415),
    "an unknown charset": ({"Content-Type": "application/json; charset=klingon"}, b"{}", 400),
    "utf-16": ({"Content-Type": "application/json; charset=utf-16"}, '{"prompt": "a"}'.encode("utf-16"), 400),
    "a mark at the beginning": ({}, b"\xef\xbb\xbf" + SENT, 400),
    "gzip that is none": ({"Content-Encoding": "gzip"}, b"\x1f\x8b\x08garbage", 415),
    "the same key twice": ({}, b'{"prompt": "a", "prompt": "b", "max_tokens": 1}', 200),
    "two values": ({}, b'{"prompt": "a"}{"prompt": "b"}', 400),
    "an odd key": ({"Authorization": "Bearer \\x00" + "k" * 5000}, SENT, 200),
}  # fmt: skip


@pytest.mark.parametrize("case", HEADERS)
def test_content_is_judged_by_what_it_is(served: Running, case: str) -> None:
    headers, body, status = HEADERS[case]
    assert check(served.client.post("/v1/completions", content=body, headers=headers)) == status


# --- connections


def dial(served: Running) -> socket.socket:
    parts = urlsplit(served.url)
    return socket.create_connection((parts.hostname or "", parts.port or 0), timeout=20)


def answer(connection: socket.socket) -> bytes:
    """All that comes until the server closes."""
    received = b""
    while piece := connection.recv(65536):
        received += piece
    return received


def post(*headers: str, body: bytes = b"", path: str = "/v1/completions") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Connection: close", *headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


SOCKET = (
    b"GET /v1/models HTTP/1.1\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
JAVA = (
    b"POST /v1/completions HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings, close\r\nHost: localhost\r\n"
    b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\nUpgrade: h2c\r\n"
    + f"Content-Length: {len(SENT)}\r\n\r\n".encode() + SENT
)  # fmt: skip
RAW: dict[str, tuple[bytes, int]] = {
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00garbage\r\n\r\n", 400),
    "an unknown version": (b"GET / HTTP/9.9\r\n\r\n", 400),
    "an unknown method": (b"BREW /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "a length that is no number": (post("Content-Length: ten", body=SENT), 400),
    "a negative length": (post("Content-Length: -5", body=SENT), 400),
    "two lengths": (post("Content-Length: 5", "Content-Length: 32", body=SENT), 400),
    "a length beyond any": (post("Content-Length: " + "9" * 40, body=SENT), 400),
    "a length that is too large": (post("Content-Length: 999999999999", body=SENT), 413),
    "a length and chunks": (post("Content-Length: 5", "Transfer-Encoding: chunked", body=SENT), 400),
    "a length that is too small": (post("Content-Length: 5", body=SENT), 400),
    "chunks of no size": (post("Transfer-Encoding: chunked", body=b"zz\r\n" + SENT + b"\r\n0\r\n\r\n"), 400),
    "a chunk of a negative size": (post("Transfer-Encoding: chunked", body=b"-4\r\nabcd\r\n0\r\n\r\n"), 400),
    "a chunk of a huge size": (post("Transfer-Encoding: chunked", body=b"f" * 17 + b"\r\nabcd"), 400),
    "an unknown coding": (post("Transfer-Encoding: rot13", body=SENT), 400),
    "a header without a colon": (post("Broken header", body=SENT), 400),
    "a header of 1 MB": (post("X-Big: " + "a" * 2**20, f"Content-Length: {len(SENT)}", body=SENT), 431),
    "ten thousand headers": (post(*(f"X-{i}: {i}" for i in range(10_000)), body=SENT), 431),
    "two headers of 40 KB": (post(f"X-A: {'a' * 40_000}", f"X-B: {'b' * 40_000}"), 431),
    "a header of nothing but spaces": (post("X-Wide: " + " " * 70_000 + "a"), 431),
    "many headers of a byte": (post(*["a:"] * 14_000), 431),
    "a head of 60 KB": (b"GET /health HTTP/1.0\r\nX-Big: " + b"a" * 60_000 + b"\r\n\r\n", 200),
    "an address of 1 MB": (b"GET /" + b"a" * 2**20 + b" HTTP/1.1\r\nConnection: close\r\n\r\n", 431),
    "a null in a header": (post("X-Null: a\0b", body=SENT), 400),
    "an address of odd characters": (b"GET /%00%ff%c3%28/../..//etc HTTP/1.1\r\nConnection: close\r\n\r\n", 404),
    "an upgrade": (post("Upgrade: h2c", f"Content-Length: {len(SENT)}", body=SENT), 200),
    "what Java's client begins with": (JAVA, 200),
    "a socket for a page": (SOCKET, 200),
    "HTTP 1.0": (b"GET /health HTTP/1.0\r\n\r\n", 200),
}  # fmt: skip


@pytest.mark.parametrize("case", RAW)
def test_broken_http_is_refused_and_closed(served: Running, case: str) -> None:
    sent, status = RAW[case]
    with closing(dial(served)) as to:
        to.sendall(sent)
        received = answer(to)
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.split(b"\r\n")[0].split(b" ")[1] == str(status).encode(), received[:300]
    if status >= 400:
        assert json.loads(body)["error"]["message"]


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_broken_connections_harm_nobody(served: Running, data: st.DataObject) -> None:
    whole = post(f"Content-Length: {len(SENT)}", body=SENT)
    at, more = data.draw(st.integers(0, len(whole))), data.draw(st.binary(max_size=8))
    with closing(dial(served)) as to:
        to.sendall(whole[:at] + more + whole[at + len(more) :])
        to.shutdown(socket.SHUT_WR)
        received = answer(to)
    assert received == b"" or received.split(b" ")[1][:1] in b"24", received[:300]


def test_a_slow_client_waits_alone_and_not_for_ever(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "REQUEST_SECONDS", 1.5)
    whole = post(f"Content-Length: {len(SENT)}", body=SENT)
    with ExitStack() as stack:
        slow = [stack.enter_context(closing(dial(served))) for _ in range(40)]
        for i, each in enumerate(slow):
            each.sendall(whole[: i * len(whole) // 40])  # nothing, a part of the head, a part of the body
        assert check(served.post("/v1/completions", {"prompt": "a", "max_tokens": 1})) == 200
        for each in slow:
            received = answer(each)  # ends, since the server closes
            assert received.split(b" ")[1] == b"408"
            assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_too_slow"


def test_a_client_that_never_reads_does_not_stay(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "STALL_SECONDS", 1.0)
    others = set(served.server.server_state.connections)
    with closing(dial(served)) as to:
        to.settimeout(0.2)
        with suppress(TimeoutError):  # until the server takes no more, since it gets rid of nothing
            to.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 10_000)
        wait_until(lambda: bool(served.server.server_state.connections - others))
        wait_until(lambda: not served.server.server_state.connections - others)
    assert served.get("/health").status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_with_requests_to_come_is_cancelled(served: Running, stream: bool) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 10_000, "ignore_eos": True, "stream": stream}).encode()
    request = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    gate = Gate(served.llm)
    try:
        with closing(dial(served)) as to:
            to.sendall(request * 3)
            wait_until(lambda: bool(served.server.worker._jobs))
        wait_until(lambda: not served.server.worker._jobs)
        assert gate.steps <= 1
    finally:
        gate.open()
    wait_until(lambda: not served.llm.engine.busy and not served.server.server_state.tasks)


def test_requests_that_come_ahead_are_answered_in_order(served: Running) -> None:
    bodies = [json.dumps({**TINY, "model": f"m{i}"} if i % 2 else TINY).encode() for i in range(20)]
    requests = [post(f"Content-Length: {len(body)}", body=body) for body in bodies]
    requests = [each.replace(b"Connection: close\r\n", b"") for each in requests[:-1]] + requests[-1:]
    with closing(dial(served)) as to:
        to.sendall(b"".join(requests))
        received = answer(to)
    assert [part[:3] for part in received.split(b"HTTP/1.1 ")[1:]] == [b"404" if i % 2 else b"200" for i in range(20)]


def test_a_client_that_leaves_within_its_body_is_no_error(served: Running) -> None:
    for _ in range(5):
        with closing(dial(served)) as to:
            to.sendall(post("Content-Length: 5000", body=SENT))
    with closing(dial(served)) as to:
        to.sendall(post("Transfer-Encoding: chunked", body=b'5\r\n{"pro\r\nwhat'))
        answer(to)


# --- afterwards; last in this file


def test_nothing_is_left_behind(served: Running, heard: list[logging.LogRecord]) -> None:
    for path, body in GOOD.items():
        assert check(served.post(path, body)) == 200
    load = served.llm.engine.load
    assert (load.running, load.waiting, load.pages_used) == (0, 0, 0)
    assert served.get("/health").status_code == 200
    assert [record.getMessage() + str(record.exc_info) for record in heard] == []
    assert 'status="5' not in served.get("/metrics").text
    wait_until(lambda: not served.server.server_state.tasks)
