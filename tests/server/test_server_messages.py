"""Anthropic's /v1/messages: the text of /v1/chat/completions, blocks of calls, streams that add up, its envelope."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from cli_checks import Pair
from sametoken import LLM
from server_checks import MODEL, Running, running, with_template

TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for m in messages %}{{ m.role }}: "
    "{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}({{ m.tool_calls[0].function.arguments | tojson }}) "
    "{% endif %}{{ m.content or '' }}{% if not loop.last %};{% endif %}{% endfor %}"
    "{% if add_generation_prompt %};assistant:{% endif %}"
)
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"],
        "additionalProperties": False}  # fmt: skip
TOOLS = [{"name": "weather", "description": "Tells it.", "input_schema": CITY}]
ASKED: dict[str, Any] = {"model": MODEL, "max_tokens": 40, "messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/messages"


@pytest.fixture(scope="module")
def server(tiny_pair: Pair, tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Iterator[Running]:
    target = with_template(tiny_pair.target, tmp_path_factory.mktemp("target"), TEMPLATE)
    with running(LLM(target, tiny_pair.draft, {"adaptive": False})) as made:
        yield made


def events(text: str) -> list[dict[str, Any]]:
    """The events of a stream; each is named as its data says."""
    found = []
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def added(told: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream makes, as Anthropic documents it."""
    message = told[0]["message"]
    texts: list[str] = []
    for each in told[1:]:
        match each["type"]:
            case "content_block_start":
                assert each["index"] == len(message["content"])
                message["content"].append(each["content_block"])
                texts.append("")
            case "content_block_delta":
                assert each["index"] == len(message["content"]) - 1
                texts[-1] += next(value for key, value in each["delta"].items() if key != "type")
            case "content_block_stop":
                block = message["content"][each["index"]]
                key = "input" if block["type"] == "tool_use" else block["type"]
                block[key] = read(texts[-1]) if key == "input" else texts[-1]
            case "message_delta":
                message |= each["delta"]
                message["usage"] |= each["usage"]
    assert told[-1]["type"] == "message_stop"
    return dict(message)


def read(text: str) -> Any:
    """The input of a call; one that was cut by length has none."""
    try:
        return json.loads(text)
    except ValueError:
        return {}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    blocks = [{key: value for key, value in block.items() if key != "id"} for block in message["content"]]
    usage = {"input": message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"],
             "output": message["usage"]["output_tokens"]}  # fmt: skip
    return {**message, "id": "", "content": blocks, "usage": usage}


@pytest.mark.parametrize("settings", [{"temperature": 0}, {"temperature": 0.9, "seed": 3, "top_k": 40, "top_p": 0.9}])
def test_the_text_is_that_of_chat_completions(server: Running, settings: dict[str, Any]) -> None:
    turns = [{"role": role, "content": text} for role, text in (("user", "hi"), ("assistant", "so"), ("user", "?"))]
    asked = {**ASKED, **settings, "messages": turns, "system": [{"type": "text", "text": "Be brief."}]}
    found = server.post(PATH, asked).json()
    system = {"role": "system", "content": "Be brief."}
    chat = {"model": MODEL, "max_tokens": 40, **settings, "messages": [system, *turns]}
    expected = server.post("/v1/chat/completions", chat).json()
    choice = expected["choices"][0]
    assert [(block["type"], block["text"]) for block in found["content"]] == [("text", choice["message"]["content"])]
    assert found["stop_reason"] == {"length": "max_tokens", "stop": "end_turn"}[choice["finish_reason"]]
    usage = found["usage"]
    read = sum(usage[name] for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"))
    assert read == expected["usage"]["prompt_tokens"]
    assert usage["output_tokens"] == expected["usage"]["completion_tokens"]
    counted = {key: value for key, value in asked.items() if key in ("model", "messages", "system")}
    tokens = server.post(f"{PATH}/count_tokens", counted).json()
    assert tokens == {"input_tokens": expected["usage"]["prompt_tokens"]}


@pytest.mark.parametrize("asked", [{"report": True}, {"steps": True}, {}])
def test_the_report_is_that_of_chat_completions(server: Running, asked: dict[str, bool]) -> None:
    body = {**ASKED, "temperature": 0, "speculative": asked}
    expected = server.post("/v1/chat/completions", body).json()["choices"][0].get("speculative")
    assert (expected is None) == (not asked)
    told = events(server.post(PATH, {**body, "stream": True}).text)
    (delta,) = [each for each in told if each["type"] == "message_delta"]
    for reply in (server.post(PATH, body).json(), delta):
        found = reply.get("speculative")
        assert (found is None) == (not asked)
        if asked:
            stats, theirs = found.pop("stats"), dict(expected["stats"])
            assert stats["acceptance_length"] == theirs["acceptance_length"]
            if "steps" in asked:  # the first forward read the prompt, or what the cache left of it
                assert found["steps"][1:] == expected["steps"][1:]
            for key in ("token_ids", "tokens", "origins", "rejected"):
                assert found[key] == expected[key]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"stop_sequences": ["a", "e", "i", "o", "u"]},
        {"tools": TOOLS, "tool_choice": {"type": "any"}, "max_tokens": 200},
        {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I think"}]},
    ],
)
def test_a_stream_adds_up_to_the_whole_reply(server: Running, more: dict[str, Any]) -> None:
    for seed in range(2):
        asked = {**ASKED, "seed": seed, **more}
        whole = server.post(PATH, asked).json()
        streamed = server.post(PATH, {**asked, "stream": True})
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert without_ids(added(events(streamed.text))) == without_ids(whole)
        if "tools" in more and whole["stop_reason"] != "max_tokens":
            assert {block["type"] for block in whole["content"]} == {"tool_use"}
            assert all(block["input"]["city"] in ("Rome", "Oslo") for block in whole["content"])
            assert whole["stop_reason"] == "tool_use"
        if "stop_sequences" in more:
            assert (whole["stop_reason"] == "stop_sequence") == (whole["stop_sequence"] is not None)


def test_a_call_and_its_result_are_sent_back(server: Running) -> None:
    call = {"type": "tool_use", "id": "c", "name": "weather", "input": {"city": "Rome"}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "Rain."}]}
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "So?", "cache_control": {"type": "ephemeral"}}]},
    ]
    found = server.post(PATH, {**ASKED, "temperature": 0, "messages": turns, "tools": TOOLS}).json()
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    chat = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c", "content": "Rain."},
        {"role": "user", "content": "So?"},
    ]
    tools = [{"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": CITY}}]
    asked = {"model": MODEL, "max_tokens": 40, "temperature": 0, "messages": chat, "tools": tools}
    expected = server.post("/v1/chat/completions", asked).json()
    assert found["content"][0]["text"] == expected["choices"][0]["message"]["content"]


def test_a_reply_goes_on_with_the_last_turn(server: Running) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I think"}]
    found = server.post(PATH, {**ASKED, "temperature": 0, "messages": turns}).json()["content"][0]["text"]
    text = "user: hi;assistant: I think"
    expected = server.post("/v1/completions", {"prompt": text, "max_tokens": 40, "temperature": 0}).json()
    assert found == expected["choices"][0]["text"]


def test_an_empty_last_turn_of_the_assistant_begins_the_reply(server: Running) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": []}]
    asked = {**ASKED, "temperature": 0}
    found, expected = (server.post(PATH, {**asked, "messages": each}).json() for each in (turns, turns[:1]))
    assert found["content"] == expected["content"]


def blocks(role: str, *given: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [ASKED["messages"][0], {"role": role, "content": list(given)}]}


USE = {"type": "tool_use", "id": "a", "name": "weather", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "rain"}
REFUSED = [
    (blocks("assistant", RESULT), 400, "invalid_request_error", "tool_result"),
    (blocks("user", USE), 400, "invalid_request_error", "tool_use"),
    (blocks("user", {"type": "thinking", "thinking": "so"}), 400, "invalid_request_error", "thinking"),
    (blocks("assistant", USE), 400, "invalid_request_error", "send its tool_result"),
    (blocks("assistant", {"type": "text", "text": "So"}, USE), 400, "invalid_request_error", "send its tool_result"),
    ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "tool_choice"),
    ({"stop_sequences": [""]}, 400, "invalid_request_error", "stop_sequences"),
    ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
    ({"model": "other"}, 404, "not_found_error", "other"),
    ({"messages": []}, 400, "invalid_request_error", "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, 400, "invalid_request_error",
     "'image' are not supported"),
    ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, 400, "invalid_request_error", "tools.0"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "nope"}}, 400, "invalid_request_error", "nope"),
    ({"max_tokns": 3}, 400, "invalid_request_error", "did you mean 'max_tokens'?"),
    ({"temperature": -1}, 400, "invalid_request_error", "temperature"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "status", "kind", "words"), REFUSED)
def test_refusals_have_anthropics_envelope(
    server: Running, change: dict[str, Any], status: int, kind: str, words: str
) -> None:
    answer = server.post(PATH, {key: value for key, value in {**ASKED, **change}.items() if value is not None})
    assert answer.status_code == status
    body = answer.json()
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert words in body["error"]["message"]


def test_keys_are_taken_from_either_header(tiny_pair: Pair) -> None:
    with running(LLM(tiny_pair.target), {"model": MODEL}, api_key=("secret",)) as server:
        for headers, status in (
            ({"x-api-key": "secret", "anthropic-version": "2023-06-01"}, 200),
            ({"Authorization": "Bearer secret"}, 200),
            ({"x-api-key": "", "Authorization": "Bearer secret"}, 200),
            ({"x-api-key": "secret", "Authorization": "Bearer of-a-proxy"}, 200),
            ({"x-api-key": "wrong", "Authorization": "Bearer wrong"}, 401),
            ({"x-api-key": "wrong"}, 401),
            ({}, 401),
        ):
            answer = server.post(PATH, {**ASKED, "max_tokens": 2}, headers=headers)
            assert answer.status_code == status
        assert answer.json()["error"]["type"] == "authentication_error"
