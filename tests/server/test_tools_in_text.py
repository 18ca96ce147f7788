"""Functions for models whose chat template has no place for them: described in words, called and answered in text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from sametoken import LLM
from sametoken.server.tools_in_text import tools_in_text
from server_checks import Running, running

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "w", "parameters": {"type": "object", "properties": {}}}}
]
CALLED = {"type": "function", "id": "1", "function": {"name": "w", "arguments": {"city": "Röm"}}}


def test_functions_stand_in_the_system_message() -> None:
    asked = {"role": "user", "content": "Hi"}
    system, user = tools_in_text([asked], TOOLS)
    assert user == asked
    assert system["role"] == "system"
    assert json.dumps(TOOLS[0]) in system["content"].splitlines()
    own, user = tools_in_text([{"role": "system", "content": "Be kind."}, asked], TOOLS)
    assert own["content"] == f"Be kind.\n\n{system['content']}"


def test_calls_and_results_are_texts() -> None:
    talk = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [CALLED, CALLED]},
        {"role": "tool", "content": "rain", "tool_call_id": "1"},
    ]
    found = tools_in_text(talk, ())
    call = '<tool_call>\n{"name": "w", "arguments": {"city": "Röm"}}\n</tool_call>'
    assert found == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": f"{call}\n{call}"},
        {"role": "user", "content": "<tool_response>\nrain\n</tool_response>"},
    ]


@pytest.fixture(scope="module")
def served(one_thread: None) -> Iterator[Running]:
    with running(LLM("embedded", speculative={"method": "none"})) as server:
        yield server


def test_a_call_is_made_and_answered(served: Running) -> None:
    talk: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
    body = {"messages": talk, "tools": TOOLS, "tool_choice": "required", "max_tokens": 200, "seed": 1}
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    body["tools"] = [{"type": "function", "function": {"name": "w", "parameters": schema}}]
    reply = served.post("/v1/chat/completions", body).json()["choices"][0]
    (call,) = reply["message"]["tool_calls"][:1]
    assert call["function"]["name"] == "w"
    assert json.loads(call["function"]["arguments"])["n"] in (1, 2)
    more = [*talk, reply["message"], {"role": "tool", "tool_call_id": call["id"], "content": "7"}]
    again = served.post("/v1/chat/completions", {**body, "messages": more, "tool_choice": "auto", "max_tokens": 4})
    assert again.status_code == 200, again.text
