"""What no request may do: crash the server, get an error that is not OpenAI's envelope, or be ignored in part."""

from __future__ import annotations

import gzip
import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from cli_checks import Pair
from sametoken import LLM
from sametoken.server.chat_schema import ChatRequest
from sametoken.server.hints import PATHS
from sametoken.server.schema import CompletionRequest, Speculative
from server_checks import MODEL, Running, running

KEY = "key of ours"


@pytest.fixture(scope="module")
def served(tiny_pair: Pair, one_thread: None) -> Iterator[Running]:
    with running(LLM(tiny_pair.target, max_batch_size=4), max_queue=150, max_body=400_000) as server:
        yield server


@pytest.fixture(scope="module")
def http(served: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=60) as client:
        yield client


def refusal(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error of an answer that is one."""
    assert response.status_code == status, response.text[:300]
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert len(body["error"]["message"]) < 2000
    return dict(body["error"])


BAD_BODIES = {
    "no json": (b"{oops", "not valid JSON"),
    "nothing": (b"", "not valid JSON"),
    "a list": (b"[1]", "expected a JSON object"),
    "invalid utf-8": (b'{"prompt": "\xff\xfe"}', "not valid JSON"),
    "a lone surrogate": (b'{"prompt": "\\ud800"}', "not valid JSON"),
    "not a number": (b'{"prompt": "a", "temperature": NaN}', "temperature"),
    "deep nesting": (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "recursion"),
    "no prompt": (b"{}", "prompt is missing"),
    "an empty prompt": (b'{"prompt": ""}', "empty"),
    "no prompts": (b'{"prompt": []}', "token ids"),
    "a prompt of objects": (b'{"prompt": [{}]}', "token ids"),
    "a huge integer": (b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", "out of range"),
    "a large integer": (b'{"prompt": "a", "max_tokens": ' + b"9" * 40 + b"0.5}", "max_tokens"),
    "two prompts, one empty": (b'{"prompt": ["a", ""]}', "empty"),
}


def test_an_empty_prompt_is_completed_where_it_has_a_token(tiny_pair: Pair, one_thread: None, tmp_path: Path) -> None:
    """A tokenizer that begins every prompt with a token of its own, as Llama's does."""
    folder = tmp_path / "begins"
    shutil.copytree(tiny_pair.target, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    token = tokenizer.id_to_token(5)
    tokenizer.post_processor = TemplateProcessing(single=f"{token} $A", special_tokens=[(token, 5)])
    tokenizer.save(str(folder / "tokenizer.json"))
    with running(LLM(str(folder), max_batch_size=2)) as server:
        asked = {"max_tokens": 3, "ignore_eos": True, "temperature": 0}
        empty, same = (server.post("/v1/completions", {**asked, "prompt": p}) for p in ("", [5]))
        assert empty.json()["choices"][0]["text"] == same.json()["choices"][0]["text"]
        assert empty.json()["usage"]["prompt_tokens"] == 1
        assert server.post("/v1/completions", {**asked, "prompt": []}).status_code == 400


@pytest.mark.parametrize("case", BAD_BODIES)
def test_bad_bodies_are_refused_in_words(http: httpx.Client, case: str) -> None:
    content, words = BAD_BODIES[case]
    error = refusal(http.post("/v1/completions", content=content))
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("method", "path", "words"),
    [
        ("POST", "/api/chat", "Not Found; ask /v1/chat/completions, or GET /docs"),
        ("POST", "/generate", "Not Found; ask /v1/completions, or GET /docs"),
        ("GET", "/api/tags", "Not Found; ask /v1/models, or GET /docs"),
        ("POST", "/v1/compleitons", "Not Found; ask /v1/completions, or GET /docs"),
        ("POST", "/nothing/like/it", "Not Found; GET /docs lists the paths"),
        ("GET", "/v1/completions", "Method Not Allowed; send POST; GET /docs lists"),
    ],
)
def test_a_path_of_another_server_names_ours(http: httpx.Client, method: str, path: str, words: str) -> None:
    status = 405 if "Allowed" in words else 404
    assert words in refusal(http.request(method, path), status)["message"]


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("n_predict", "unknown field 'n_predict': the limit is max_tokens"),
        ("options", "send each of its keys as a field of its own"),
        ("num_speculative_tokens", "send speculative.max_draft_len"),
        ("max_tokns", "did you mean 'max_tokens'?"),
    ],
)
def test_a_field_of_another_server_names_ours(http: httpx.Client, field: str, words: str) -> None:
    error = refusal(http.post("/v1/completions", json={"prompt": "a", field: 5}))
    assert words in error["message"]
    assert (error["param"], error["code"]) == (field, "unknown_parameter")


def test_a_server_can_be_told_to_ignore_fields_of_others(tiny_pair: Pair, one_thread: None) -> None:
    asked = {"prompt": "a", "max_tokens": 4, "seed": 1}
    with running(LLM(tiny_pair.target), ignore_unknown_fields=True) as server:
        plain = server.post("/v1/completions", asked).json()
        beside = server.post("/v1/completions", {**asked, "logits_processors": [], "api_key": "x" * 200_000}).json()
        assert beside["choices"] == plain["choices"]
        wrong = server.post("/v1/completions", {**asked, "options": {}, "temperature": -1})
        assert refusal(wrong)["param"] == "temperature"


def test_every_path_that_is_named_is_there(http: httpx.Client) -> None:
    assert set(PATHS.values()) <= http.get("/openapi.json").json()["paths"].keys()


BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokns": 3}, "max_tokns"),
    ({"n": 100_000}, "n"),
    ({"n": -1}, "n"),
    ({"n": "2"}, "n"),
    ({"n": 100, "best_of": 2}, "best_of"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -7}, "top_k"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"stop": ["x"] * 10_000}, "stop"),
    ({"stop": "x" * 5000}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop_token_ids": [100_000]}, "stop_token_ids"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 1000}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"bad_words": [""]}, "bad_words.0"),
    ({"seed": 1.5}, "seed"),
    ({"suffix": "tail"}, "suffix"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"stream": True, "best_of": 3}, "best_of"),
    ({"speculative": {"method": "magic"}}, "speculative.method"),
    ({"speculative": {"max_draft_len": 1000}}, "speculative.max_draft_len"),
    ({"speculative": {"lenght": 1}}, "speculative.lenght"),
    ({"prompt": [[3, 4], [5, 500]]}, "prompt"),
    ({"prompt": ["a"] * 2000}, "prompt"),
    ({"prompt": ["a"] * 200}, "n"),
    ({"min_tokens": 10**9, "max_tokens": None}, "min_tokens"),
]


def test_an_integer_may_be_written_as_a_number_without_a_fraction(http: httpx.Client) -> None:
    """As JSON Schema means it, and so the document that describes the server."""
    asked = {"prompt": [3, 4, 5], "max_tokens": 4, "seed": 7, "stop_token_ids": [9], "n": 2, "logprobs": 1}
    asked["speculative"] = {"max_draft_len": 0}
    floats = json.loads(json.dumps(asked), parse_int=float)
    assert '"max_tokens": 4.0' in json.dumps(floats)
    expected, got = (http.post("/v1/completions", json=body).json() for body in (asked, floats))
    assert got["choices"] == expected["choices"]
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2.0, "top_logprobs": 1.0, "logprobs": True}
    assert http.post("/v1/chat/completions", json=chat).status_code == 200
    assert http.post("/detokenize", json={"tokens": [5.0, 6]}).status_code == 200


@pytest.mark.parametrize(("fields", "param"), BAD_FIELDS, ids=lambda value: str(value)[:40])
def test_a_bad_field_is_named(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    error = refusal(http.post("/v1/completions", json={"prompt": "abc", **fields}))
    assert error["param"] == (param or None)
    assert param.split(".")[-1] in error["message"]


BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages.0"),
    ({"messages": [{"role": "", "content": "hi"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages.0.content"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    ({"modalities": ["audio"]}, "modalities.0"),
    ({"continue_final_message": 1}, "continue_final_message"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"functions": []}, "functions"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), BAD_CHATS, ids=lambda value: str(value)[:40])
def test_a_bad_field_of_a_chat_is_named(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    assert refusal(http.post("/v1/chat/completions", json=body))["param"] == (param or None)


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(http: httpx.Client) -> None:
    error = refusal(http.post("/v1/completions", json={"prompt": "a" * 500}))
    assert "500" in error["message"]
    assert "128" in error["message"]
    assert error["code"] == "context_length_exceeded"


def test_a_body_that_is_too_large_is_refused_stated_or_not(http: httpx.Client) -> None:
    big = b'{"prompt": "' + b"a" * 500_000 + b'"}'
    assert refusal(http.post("/v1/completions", content=big), 413)["code"] == "body_too_large"
    pieces = (big[i : i + 50_000] for i in range(0, len(big), 50_000))
    assert refusal(http.post("/v1/completions", content=pieces), 413)["code"] == "body_too_large"


@pytest.mark.parametrize("size", [500_000, 9_000_000])
@pytest.mark.parametrize("stated", [True, False])
def test_a_client_that_sends_too_much_sees_why(served: Running, size: int, stated: bool) -> None:
    """On a bare socket, which is reset where the server closes it with bytes unread."""
    host, port = served.url.removeprefix("http://").split(":")
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port)), timeout=30) as sent:
        if stated:
            sent.sendall(f"{head}Content-Length: {size}\r\n\r\n".encode() + b"a" * size)
        else:
            chunk = b"186a0\r\n" + b"a" * 100_000 + b"\r\n"
            sent.sendall(
                f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + chunk * (size // 100_000) + b"0\r\n\r\n"
            )
        answer = b""
        while piece := sent.recv(65536):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"body_too_large" in answer


def test_a_client_that_asks_first_is_refused_before_it_sends(served: Running) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port)), timeout=30) as sent:
        sent.sendall(f"{head}Content-Length: 500000\r\nExpect: 100-continue\r\n\r\n".encode())
        assert sent.recv(65536).startswith(b"HTTP/1.1 413 ")


def test_a_compressed_body_is_refused_as_such(http: httpx.Client) -> None:
    plain = b'{"prompt": "a", "max_tokens": 2}'
    packed = http.post("/v1/completions", content=gzip.compress(plain), headers={"Content-Encoding": "gzip"})
    assert refusal(packed, 415)["code"] == "unsupported_encoding"
    assert http.post("/v1/completions", content=plain, headers={"Content-Encoding": "identity"}).status_code == 200


def test_unknown_models_paths_and_methods_have_the_envelope_too(http: httpx.Client) -> None:
    error = refusal(http.post("/v1/completions", json={"prompt": "a", "model": "gpt-5"}), 404)
    assert error["code"] == "model_not_found"
    assert MODEL in error["message"]
    refusal(http.get("/v2/completions"), 404)
    refusal(http.get("/v1/completions"), 405)


def test_null_is_the_same_as_leaving_a_field_out(http: httpx.Client) -> None:
    fields = dict.fromkeys(name for name in CompletionRequest.model_fields if name != "prompt")
    said = http.post("/v1/completions", json={"prompt": "abc", **fields, "temperature": 0, "max_tokens": 4})
    plain = http.post("/v1/completions", json={"prompt": "abc", "temperature": 0, "max_tokens": 4})
    assert said.status_code == 200
    assert said.json()["choices"] == plain.json()["choices"]
    inner = dict.fromkeys(Speculative.model_fields)
    body = {"prompt": "abc", "temperature": 0, "max_tokens": 4, "speculative": inner}
    assert http.post("/v1/completions", json=body).json()["choices"] == plain.json()["choices"]
    fields = dict.fromkeys(name for name in ChatRequest.model_fields if name != "messages")
    chat = {"messages": [{"role": "user", "content": "hi"}], **fields, "max_tokens": 2}
    assert http.post("/v1/chat/completions", json=chat).status_code == 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
COMPLETION_FIELDS = st.sampled_from(sorted(CompletionRequest.model_fields.keys() - {"max_tokens"}))
CHAT_FIELDS = st.sampled_from(sorted(ChatRequest.model_fields.keys() - {"max_tokens"}))


def check(response: httpx.Response) -> None:
    if response.status_code != 200:
        assert 400 <= response.status_code < 500, response.text
        refusal(response, response.status_code)
    elif not response.headers["content-type"].startswith("text/event-stream"):
        json.loads(response.content)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields=st.dictionaries(COMPLETION_FIELDS, JSON, max_size=4), chat=st.dictionaries(CHAT_FIELDS, JSON, max_size=4))
def test_any_json_in_any_field_is_answered(http: httpx.Client, fields: dict[str, Any], chat: dict[str, Any]) -> None:
    check(http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2, **fields}))
    check(
        http.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, **chat}
        )
    )


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=60), path=st.sampled_from(["/v1/completions", "/tokenize", "/detokenize"]))
def test_any_bytes_are_answered(http: httpx.Client, content: bytes, path: str) -> None:
    check(http.post(path, content=content))


def test_the_server_still_serves_after_all_this(http: httpx.Client, served: Running) -> None:
    assert http.get("/health").status_code == 200
    load = served.llm.engine.load
    assert (load.running, load.waiting, load.pages_used) == (0, 0, 0)


# --- keys and origins


@pytest.fixture(scope="module")
def locked(tiny_pair: Pair, one_thread: None) -> Iterator[Running]:
    names = ["first", "second"]
    llm = LLM(tiny_pair.target, max_batch_size=1)
    with running(llm, api_key=["other", KEY], served_model_name=names, cors_origin=["http://a.example"]) as server:
        yield server


def test_keys_are_asked_for_where_there_is_something_to_take(locked: Running) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}, {"Authorization": f"Basic {KEY}"}):
        for path in ("/v1/models", "/metrics", "/server_info", "/nowhere"):
            error = refusal(locked.get(path, headers=headers), 401)
            assert error["code"] == "invalid_api_key"
        refusal(locked.post("/v1/completions", {"prompt": "a"}, headers=headers), 401)
    for path in ("/health", "/live", "/version"):
        assert locked.get(path).status_code == 200
    for key in (KEY, "other"):
        assert locked.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200


def test_the_first_served_name_stands_in_replies_and_all_are_taken(locked: Running) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    for name in ("first", "second"):
        reply = locked.post("/v1/completions", {"prompt": "a", "model": name, "max_tokens": 1}, headers=headers)
        assert reply.json()["model"] == "first"
    refusal(locked.post("/v1/completions", {"prompt": "a", "model": MODEL}, headers=headers), 404)


def test_only_named_origins_may_call_from_pages(locked: Running, served: Running) -> None:
    asked = {"Origin": "http://a.example", "Access-Control-Request-Method": "POST"}
    allowed = httpx.options(locked.url + "/v1/completions", headers=asked)
    assert allowed.headers["access-control-allow-origin"] == "http://a.example"
    refused = httpx.options(locked.url + "/v1/completions", headers={**asked, "Origin": "http://b.example"})
    assert "access-control-allow-origin" not in refused.headers
    assert "access-control-allow-origin" not in httpx.get(served.url + "/health", headers=asked).headers
