"""OpenAI's client for Node: streams, calls of functions, errors by their class, and a stream that its reader leaves."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from clients_checks import CITIES, FORMED, HERE, HOME, MESSAGES, PARAMETERS, PATIENCE_S, SAMPLED, Served, said

TOOLS = [{"type": "function", "function": {"name": "forecast", "parameters": PARAMETERS}}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "forecast", "strict": True, "schema": PARAMETERS}}
LONG = {"messages": MESSAGES, "max_tokens": 900, "n": 8, "ignore_eos": True, "seed": 3}


def ask(served: Served, **requests: Any) -> Any:
    """What the client makes of each request, which is (way, body)."""
    asked = json.dumps({name: {"way": way, "body": body} for name, (way, body) in requests.items()})
    program = HERE / "openai_node.cjs"
    return json.loads(said("node", program, served.url, served.model, asked, NODE_PATH=str(HOME / "node/node_modules")))


def test_a_stream_is_what_curl_is_told(served: Served) -> None:
    body = {"messages": MESSAGES, **SAMPLED}
    expected = served.curl("/v1/chat/completions", **body)
    got = ask(served, reply=("streamed", body))["reply"]
    assert got["text"] == expected["choices"][0]["message"]["content"] != ""
    assert got["finish_reason"] == expected["choices"][0]["finish_reason"]
    assert got["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"] <= 40
    assert got["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
    assert got["chunks"] > 2


def test_calls_and_forms_come_in_streams_that_the_client_can_add_up(served: Served) -> None:
    called = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", **FORMED}
    formed = {"messages": MESSAGES, "response_format": SCHEMA, **FORMED}
    got = ask(served, called=("accumulated", called), formed=("accumulated", formed))
    assert got["called"]["finish_reason"] == "tool_calls"
    (call,) = got["called"]["message"]["tool_calls"]
    assert call["function"]["name"] == "forecast"
    expected = served.curl("/v1/chat/completions", **called)["choices"][0]["message"]["tool_calls"]
    assert call["function"]["arguments"] == expected[0]["function"]["arguments"]
    for text in (call["function"]["arguments"], got["formed"]["message"]["content"]):
        arguments = json.loads(text)
        assert arguments["city"] in CITIES
        assert 1 <= arguments["days"] <= 9


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"model": "other"}, {"class": "NotFoundError", "status": 404, "code": "model_not_found", "param": "model"}),
        ({"temperature": -1}, {"class": "BadRequestError", "status": 400, "param": "temperature"}),
        ({"messages": [{"role": "user", "content": "a " * 2000}]}, {"status": 400, "code": "context_length_exceeded"}),
    ],
)
def test_errors_are_of_the_clients_classes(served: Served, change: dict[str, Any], expected: dict[str, Any]) -> None:
    got = ask(served, error=("failed", {"messages": MESSAGES, **change}))["error"]
    assert {key: got[key] for key in expected} == expected
    assert len(got["message"]) > 20


def test_a_stream_that_is_left_is_cancelled(served: Served) -> None:
    before = served.counts()
    assert ask(served, left=("aborted", LONG))["left"]["text"]
    deadline = time.monotonic() + PATIENCE_S
    while (after := served.counts())["sametoken_num_requests_running"] and time.monotonic() < deadline:
        time.sleep(0.05)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["sametoken_request_success_total{abort}"] == 8
    assert 0 < grown["sametoken_generation_tokens_total"] < 8 * 900
