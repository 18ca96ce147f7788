"""Anthropic's client: replies and streams are what curl is told, calls and their results over several turns, errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from clients_checks import CITIES, HERE, PARAMETERS, PYTHON, Served, said

TURNS = ["What do you like to do for fun?", "And you?", "Why?"]
SETTINGS = {"temperature": 0.8, "seed": 11}
TOOL = {"name": "forecast", "description": "The weather of the next days.", "input_schema": PARAMETERS}


@pytest.fixture(scope="module")
def told(served: Served) -> Any:
    """What each way of asking came to."""
    request = json.dumps({"turns": TURNS, "settings": SETTINGS, "max_tokens": 40, "tool": TOOL})
    return json.loads(said(PYTHON / "python", HERE / "anthropic_messages.py", served.url, served.model, request))


def test_replies_and_streams_are_what_chat_completions_says(served: Served, told: Any) -> None:
    messages = [{"role": "user", "content": TURNS[0]}]
    reply = served.curl("/v1/chat/completions", messages=messages, max_tokens=40, **SETTINGS)
    text = reply["choices"][0]["message"]["content"]
    for each in (told["whole"], told["streamed"]):
        assert each["blocks"] == [{"type": "text", "text": text}]
        assert each["input_tokens"] == reply["usage"]["prompt_tokens"]
        assert each["output_tokens"] == reply["usage"]["completion_tokens"]
    assert told["streamed"]["text"] == text
    assert told["counted"] == reply["usage"]["prompt_tokens"]


def test_a_call_its_result_and_turns_after_it(told: Any) -> None:
    call, *replies = told["conversed"]
    assert call["stop_reason"] == "tool_use"
    assert {block["name"] for block in call["blocks"]} == {"forecast"}
    assert call["blocks"][0]["input"]["city"] in CITIES
    assert len(replies) == len(TURNS) - 1
    assert all(block["type"] == "text" for reply in replies for block in reply["blocks"])
    assert replies[0]["input_tokens"] < replies[1]["input_tokens"]


def test_what_the_server_refuses_is_anthropics_error(told: Any) -> None:
    assert told["refused"] == {"status": 404, "type": "not_found_error"}
