"""What the server logs: ids of requests, lines that no client can forge, the access log, and JSON."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli_checks import Pair
from sametoken import LLM
from sametoken.server.completion_words import CompletionWords
from sametoken.server.exchange import VALID_ID
from sametoken.server.logs import JsonFormatter, TextFormatter
from server_checks import Running, running, wait_until

CONTEXT = 128  # of the tiny target
FORGED = 'me\n2026-01-01 00:00:00,000 INFO 1.2.3.4:5 "GET /admin HTTP/1.1" 200\r\x1b[2K\u2028gone'
ASKED = {"prompt": "abc", "max_tokens": 3, "ignore_eos": True}
START = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ (\[[\x21-\x7e]+\] )?")


@pytest.fixture(scope="module")
def served(tiny_pair: Pair, one_thread: None) -> Iterator[Running]:
    with running(LLM(tiny_pair.target, max_batch_size=2), log_level="debug") as server:
        yield server


@contextmanager
def logged(formatter: logging.Formatter, level: int = logging.INFO) -> Iterator[io.StringIO]:
    """Everything that is logged within, as a server's standard error has it."""
    stream = io.StringIO()
    handler, root = logging.StreamHandler(stream), logging.getLogger("sametoken")
    handler.setFormatter(formatter)
    before = root.level
    root.addHandler(handler)
    root.setLevel(level)
    try:
        yield stream
    finally:
        root.removeHandler(handler)
        root.setLevel(before)


def lines(stream: io.StringIO, count: int) -> list[str]:
    """At least so many lines: the last one comes after the answer."""
    wait_until(lambda: stream.getvalue().count("\n") >= count)
    return stream.getvalue().removesuffix("\n").split("\n")


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("completions", "max_tokens"), ("chat/completions", "max_completion_tokens"),
        ("responses", "max_output_tokens"), ("messages", "max_tokens"),
    ],
)  # fmt: skip
def test_a_limit_beyond_the_context_is_logged_and_ends_there(served: Running, path: str, field: str) -> None:
    turns = [{"role": "user", "content": "abc"}]
    asked = {"completions": {"prompt": "abc"}, "responses": {"input": "abc"}}.get(path, {"messages": turns})
    ends = {} if path == "messages" else {"ignore_eos": True}
    with logged(TextFormatter()) as stream:
        reply = served.post(f"/v1/{path}", {**asked, **ends, field: 10**6})
        fits = served.post(f"/v1/{path}", {**asked, **ends, field: 5})
        said = lines(stream, 3)
    assert (reply.status_code, fits.status_code) == (200, 200)
    used = reply.json()["usage"]
    if ends:
        assert sum(used[key] for key in ("prompt_tokens", "completion_tokens") if key in used) in (0, CONTEXT)
    (line,) = [each for each in said if "the context holds" in each]
    assert f"{field} is 1000000 and the context holds" in line
    assert "there the reply ends by length" in line


def test_no_text_of_a_client_begins_a_line(served: Running) -> None:
    with logged(TextFormatter(), logging.DEBUG) as stream:
        assert served.post("/v1/completions", {**ASKED, "user": FORGED}).status_code == 200
        found = lines(stream, 2)
    assert len(found) == 2
    assert all(START.match(line) and line.isprintable() for line in found)
    assert any("/admin" in line for line in found)  # it was logged


@given(st.text())
def test_a_text_line_is_one_line(text: str) -> None:
    record = logging.LogRecord("x", logging.INFO, "x", 1, "user %s", (text,), None)
    line = TextFormatter().format(record)
    assert len((line + "|").splitlines()) == 1
    assert START.match(line)


def test_a_traceback_is_indented() -> None:
    error = ValueError(FORGED)
    record = logging.LogRecord("x", 40, "x", 1, "it failed", (), (ValueError, error, error.__traceback__))
    first, *rest = TextFormatter().format(record).split("\n")
    assert first.endswith("ERROR it failed")
    assert all(line.startswith("    ") and line.isprintable() for line in rest)
    assert FORGED in json.loads(JsonFormatter().format(record))["exception"]


def test_an_id_is_taken_returned_and_logged(served: Running) -> None:
    with logged(TextFormatter(), logging.DEBUG) as stream:
        answer = served.post("/v1/completions", {**ASKED, "stream": True}, headers={"X-Request-Id": "job-7/a"})
        found = lines(stream, 2)
    assert answer.headers.get_list("x-request-id") == ["job-7/a"]
    assert all("[job-7/a] " in line for line in found)


@pytest.mark.parametrize("given", [b"", b"two words", b"x" * 129, b"\xff\xfe", b"tab\tbed"])
def test_an_id_that_could_not_be_logged_is_replaced(served: Running, given: bytes) -> None:
    answer = httpx.get(served.url + "/v1/models", headers=[(b"X-Request-Id", given)])
    assert VALID_ID.fullmatch(answer.headers["x-request-id"].encode())
    assert answer.headers["x-request-id"].startswith("req-")


def test_ids_are_made_and_differ(served: Running) -> None:
    answers = [served.get("/health"), served.get("/nowhere"), served.post("/v1/completions", {"promt": 1})]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert len(set(ids)) == 3


def test_answers_name_no_request_where_they_shall_not(tiny_pair: Pair) -> None:
    with running(LLM(tiny_pair.target), enable_request_id_headers=False) as server:
        for answer in (server.get("/health"), server.get("/nowhere"), server.post("/v1/completions", ASKED)):
            assert "x-request-id" not in answer.headers
            assert "x-request-id" not in server.get("/health", headers={"X-Request-Id": "mine"}).headers


def test_errors_are_logged_with_the_id_and_not_told(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ValueError(FORGED)

    monkeypatch.setattr(CompletionWords, "whole", broken)
    with logged(TextFormatter()) as stream, httpx.Client(base_url=served.url) as client:
        answer = client.post("/v1/completions", json=ASKED, headers={"X-Request-Id": "seven"})
        found = lines(stream, 3)
    assert answer.status_code == 500
    assert answer.headers["x-request-id"] == "seven"
    assert "admin" not in answer.text
    assert "ERROR [seven] a request failed" in found[0]
    assert all(line.startswith("    ") or "[seven]" in line for line in found)


def test_a_reply_that_cannot_be_begun_keeps_no_place(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ValueError(FORGED)

    monkeypatch.setattr(CompletionWords, "__init__", broken)
    with httpx.Client(base_url=served.url) as client:
        assert client.post("/v1/completions", json=ASKED).status_code == 500
    assert served.server.worker.open_requests == 0


def test_the_access_log_has_a_line_per_request(served: Running) -> None:
    with logged(TextFormatter()) as stream:
        served.post("/v1/completions", ASKED)
        lines(stream, 1)  # a line may come after the reply: without this wait the next request's could be before it
        served.get("/a%20%22quoted%22%0aPATH")
        lines(stream, 2)
        served.get("/health")  # a probe that goes well is not worth a line
        served.post("/v1/completions", {"prompt": 1})
        found = lines(stream, 3)
    assert len(found) == 3
    completion, quoted, refused = found
    line = r'127\.0\.0\.1:\d+ "POST /v1/completions HTTP/1\.1" 200 in \d\.\d{3} s, 3 \+ 3 tokens$'
    assert re.search(line, completion)
    assert re.search(r'"GET /a%20%22quoted%22\S* HTTP/1\.1" 404 in', quoted)
    assert re.search(r'"POST /v1/completions HTTP/1\.1" 400 in', refused)


def test_json_lines_hold_fields(served: Running) -> None:
    with logged(JsonFormatter(), logging.DEBUG) as stream:
        served.post("/v1/completions", {**ASKED, "user": FORGED}, headers={"X-Request-Id": "abc"})
        user, access = (json.loads(line) for line in lines(stream, 2))
    assert user["request_id"] == access["request_id"] == "abc"
    assert FORGED.encode("unicode_escape").decode()[:3] in user["message"]
    assert access["logger"] == "sametoken.access"
    assert access["level"] == "info"
    assert (access["method"], access["path"], access["status"]) == ("POST", "/v1/completions", 200)
    assert (access["prompt_tokens"], access["completion_tokens"]) == (3, 3)
    assert 0 < access["seconds"] < 60
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", access["time"])


def test_a_proxys_word_for_the_client_forges_nothing(served: Running) -> None:
    with logged(TextFormatter()) as stream:
        served.get("/v1/models", headers={"X-Forwarded-For": '1.2.3.4" 200 "GET /x'})
        (line,) = lines(stream, 1)
    assert line.count('"') == 2


def test_the_access_log_can_be_turned_off(tiny_pair: Pair, one_thread: None) -> None:
    with running(LLM(tiny_pair.target, max_batch_size=2), access_log=False) as server:
        with logged(TextFormatter()) as stream:
            assert server.post("/v1/completions", ASKED).status_code == 200
        assert stream.getvalue() == ""


def test_a_request_that_is_no_http_has_an_id(served: Running) -> None:
    with logged(TextFormatter()) as stream:
        answer = httpx.get(served.url + "/health", headers={"X-Big": "a" * 70_000})
        (line,) = lines(stream, 1)
    assert answer.status_code == 431
    assert answer.headers["x-request-id"] in line
