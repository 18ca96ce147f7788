"""LangChain's ChatOpenAI: replies, streams and batches are what curl is told; calls, their results, forms, errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from clients_checks import CITIES, FORMED, HERE, PARAMETERS, PYTHON, SAMPLED, Served, said

TEXTS = ["What do you like to do for fun?", "I have a new dog!", "Tell me about the sea."]
SCHEMA = {"title": "forecast", "description": "The weather of the next days.", **PARAMETERS}


@pytest.fixture(scope="module")
def told(served: Served) -> Any:
    """What each way of asking came to."""
    request = json.dumps({"texts": TEXTS, "schema": SCHEMA, "settings": SAMPLED, "formed": FORMED})
    return json.loads(said(PYTHON / "python", HERE / "langchain_chat.py", served.url, served.model, request))


def curled(served: Served, text: str) -> dict[str, Any]:
    reply = served.curl("/v1/chat/completions", messages=[{"role": "user", "content": text}], **SAMPLED)
    used = {"input_tokens": reply["usage"]["prompt_tokens"], "output_tokens": reply["usage"]["completion_tokens"]}
    (choice,) = reply["choices"]
    return {"text": choice["message"]["content"], "finish_reason": choice["finish_reason"], **used}


def short(seen: dict[str, Any]) -> dict[str, Any]:
    counted = {key: seen["usage"][key] for key in ("input_tokens", "output_tokens")}
    return {"text": seen["text"], "finish_reason": seen["finish_reason"], **counted}


def test_replies_streams_and_batches_are_what_curl_is_told(served: Served, told: Any) -> None:
    expected = [curled(served, text) for text in TEXTS]
    assert len({each["text"] for each in expected}) == 3
    assert short(told["invoked"]) == expected[0]
    assert short(told["streamed"]) == expected[0]
    assert told["streamed"]["chunks"] > 2
    assert [short(each) for each in told["batched"]] == expected


def test_a_call_its_result_and_the_reply_to_it(served: Served, told: Any) -> None:
    call, reply = told["conversed"]["call"], told["conversed"]["reply"]
    assert call["finish_reason"] == "tool_calls"
    assert [each["name"] for each in call["calls"]] == ["forecast"]
    assert call["calls"][0]["args"]["city"] in CITIES
    assert reply["calls"] == []
    function = {"name": "forecast", "arguments": json.dumps(call["calls"][0]["args"])}
    turns = [
        {"role": "user", "content": TEXTS[0]},
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "content": "It will rain.", "tool_call_id": "1"},
    ]
    expected = served.curl("/v1/chat/completions", messages=turns, **FORMED)
    assert reply["text"] == expected["choices"][0]["message"]["content"]
    assert reply["usage"]["input_tokens"] == expected["usage"]["prompt_tokens"]


def test_a_structured_output_is_of_its_schema(told: Any) -> None:
    assert told["structured"]["city"] in CITIES
    assert 1 <= told["structured"]["days"] <= 9
    assert told["structured"].keys() == PARAMETERS["properties"].keys()


def test_what_the_server_refuses_is_openais_error(told: Any) -> None:
    assert told["refused"] == {"status": 400, "param": "temperature"}
