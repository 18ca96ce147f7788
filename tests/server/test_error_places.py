"""An error names the field at fault as the client knows it, down to the part of it that is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cli_checks import Pair
from sametoken.engine.llm import LLM
from server_checks import Running, running

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
NESTED = {"type": "function", "function": {"name": "f"}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "abc"},
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [USER], "max_tokens": 4},
    "/tokenize": {"prompt": "abc"},
}
JSON_OBJECT = {"type": "json_object"}
BAD_SCHEMA = {"type": "json_schema", "name": "x", "schema": {"type": "nothing"}}
COMPLETIONS, CHAT, RESPONSES, MESSAGES, TOKENIZE = BODIES
WRONG: list[tuple[str, dict[str, Any], str]] = [
    (RESPONSES, {"text": {"format": BAD_SCHEMA}}, "text.format"),
    (RESPONSES, {"min_tokens": 9, "max_output_tokens": 3}, "min_tokens"),
    (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens"),
    (RESPONSES, {"input": "a" * 500}, "input"),
    (RESPONSES, {"input": [{"role": "user", "content": 5}]}, "input.0.content"),
    (RESPONSES, {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input.0.call_id"),
    (RESPONSES, {"input": [{"type": "reasoning", "summary": []}]}, "input"),
    (RESPONSES, {"tool_choice": "required"}, "tool_choice"),
    (RESPONSES, {"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
    (CHAT, {"messages": [{"role": "user", "content": "a" * 500}]}, "messages"),
    (CHAT, {"tools": [NESTED], "tool_choice": {"type": "function", "function": {}}}, "tool_choice"),
    (CHAT, {"tools": [NESTED], "tool_choice": {"type": "function", "function": {"name": 5}}}, "tool_choice"),
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT, {"min_tokens": 9, "max_completion_tokens": 3}, "min_tokens"),
    (CHAT, {"stop": {"a": 1}}, "stop"),
    (CHAT, {"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
    (CHAT, {"speculative": {"method": "magic"}}, "speculative.method"),
    (CHAT, {"speculative": {"max_draft_len": 10**6}}, "speculative.max_draft_len"),
    (COMPLETIONS, {"prompt": "a" * 500}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", ""]}, "prompt"),
    (COMPLETIONS, {"logit_bias": {"5": "x"}}, "logit_bias.5"),
    (TOKENIZE, {"prompt": None, "messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]},
     "messages.0.tool_calls.0.id"),
]  # fmt: skip


@pytest.fixture(scope="module")
def served(tiny_pair: Pair, one_thread: None) -> Iterator[Running]:
    with running(LLM(tiny_pair.target, tiny_pair.draft)) as server:
        yield server


@pytest.mark.parametrize(("path", "fields", "param"), WRONG, ids=lambda value: str(value)[:60])
def test_the_field_is_named_as_the_client_has_it(
    served: Running, path: str, fields: dict[str, Any], param: str
) -> None:
    answer = served.post(path, {**BODIES[path], **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert error["message"].startswith(param)


def test_no_error_of_responses_names_fields_of_chats(served: Running) -> None:
    for path, fields, _ in WRONG:
        if path == RESPONSES:
            message = served.post(path, {**BODIES[path], **fields}).json()["error"]["message"]
            assert "response_format" not in message
            assert "max_tokens" not in message


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens: got -1"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text is missing"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
            "messages.0.content.0.text: got 5",
        ),
        ({"messages": [{"role": "user", "content": "a" * 500}]}, "messages: the prompt has"),
        ({"messages": [{"role": "user", "content": []}]}, "messages: has no content"),
        ({"stop_sequences": 5}, "stop_sequences: got 5"),
    ],
)
def test_places_of_messages(served: Running, fields: dict[str, Any], words: str) -> None:
    answer = served.post(MESSAGES, {**BODIES[MESSAGES], **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(words)
