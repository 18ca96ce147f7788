"""/v1/responses says what /v1/chat/completions says, in its own form; its stream adds up to its reply."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from cli_checks import Pair
from sametoken import LLM
from server_checks import MODEL, Running, openai_client, running, with_template

TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}assistant:"
)
ASKED: dict[str, Any] = {"model": MODEL, "temperature": 0.8, "max_output_tokens": 12}
SEED = {"seed": 5}
TOOL: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"x": {"enum": [1, 2]}},
        "required": ["x"],
        "additionalProperties": False,
    },
    "strict": True,
}


@pytest.fixture(scope="module")
def served(tiny_pair: Pair, tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Iterator[Running]:
    target = with_template(tiny_pair.target, tmp_path_factory.mktemp("target"), TEMPLATE)
    with running(LLM(target, speculative={"max_draft_len": 4, "adaptive": False})) as server:
        yield server


@pytest.fixture
def client(served: Running) -> Iterator[OpenAI]:
    with openai_client(served) as made:
        yield made


def test_the_text_is_the_chats(client: OpenAI) -> None:
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
        temperature=0.8,
        max_tokens=12,
        seed=5,
        logprobs=True,
    )
    for given in ("hi", [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]):
        got = client.responses.create(
            **ASKED, input=given, instructions="be brief", include=["message.output_text.logprobs"], extra_body=SEED
        )
        assert got.output_text == chat.choices[0].message.content
        assert got.object == "response"
        assert got.usage is not None
        assert chat.usage is not None
        assert (got.usage.input_tokens, got.usage.output_tokens) == (
            chat.usage.prompt_tokens,
            chat.usage.completion_tokens,
        )
        assert got.status == ("incomplete" if chat.choices[0].finish_reason == "length" else "completed")
        part = got.output[0].content[0]  # type: ignore[union-attr, index]
        assert chat.choices[0].logprobs is not None
        assert [item.logprob for item in part.logprobs] == [
            item.logprob for item in chat.choices[0].logprobs.content or []
        ]


def test_a_stream_adds_up_to_the_response_and_is_numbered(client: OpenAI) -> None:
    whole = client.responses.create(**ASKED, input="hi", extra_body=SEED)
    events = list(client.responses.create(**ASKED, input="hi", extra_body=SEED, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:-1] == ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    last = events[-1]
    assert last.type == f"response.{whole.status}"
    assert last.response.output_text == whole.output_text  # type: ignore[union-attr]
    assert last.response.usage == whole.usage  # type: ignore[union-attr]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_calls_are_items_and_their_output_can_be_sent_back(client: OpenAI, choice: Any) -> None:
    asked: dict[str, Any] = {
        **ASKED,
        "max_output_tokens": 80,
        "tools": [TOOL],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "extra_body": SEED,
    }
    got = client.responses.create(**asked, input="hi")
    (call,) = got.output
    assert call.type == "function_call"
    assert call.name == "weather"
    assert json.loads(call.arguments)["x"] in (1, 2)
    events = list(client.responses.create(**asked, input="hi", stream=True))
    done = next(event for event in events if event.type == "response.function_call_arguments.done")
    assert done.arguments == call.arguments
    assert not [event for event in events if event.type == "response.output_text.delta"]
    again: list[Any] = [
        {"role": "user", "content": "hi"},
        call.to_dict(),
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
    ]
    assert client.responses.create(**ASKED, input=again, tools=[TOOL], extra_body=SEED).output_text


def test_a_form_is_kept_and_speculation_is_reported(served: Running) -> None:
    schema = {"type": "json_schema", "name": "x", "schema": {"const": {"key": "value"}}}
    body = {"input": "hi", "text": {"format": schema}, "speculative": {"report": True}}
    got = served.post("/v1/responses", body).json()
    assert json.loads(got["output"][0]["content"][0]["text"]) == {"key": "value"}
    assert got["speculative"]["stats"]["drafted_by"]["forced"] > 0
    assert got["status"] == "completed"


@pytest.mark.parametrize(
    "fields",
    [
        {"input": []},
        {"input": 5},
        {"input": [{"type": "reasoning"}]},
        {"input": [{"role": "user"}]},
        {"background": True, "store": False},
        {"max_output_tokens": 0},
        {"n": 2},
        {"reasoning": {"effort": "very high"}},
        {"tool_choice": "required"},
        {"text": {"format": {"type": "xml"}}},
        {"temperature": -1},
        {"truncation": "auto"},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"tools": [TOOL], "tool_choice": {"type": "function", "name": "fly"}},
    ],
    ids=lambda fields: json.dumps(fields)[:40],
)
def test_what_cannot_be_honoured_is_refused(client: OpenAI, fields: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**{"input": "hi", **ASKED}, extra_body=fields)
    assert refused.value.body["message"]  # type: ignore[index, call-overload]


@pytest.mark.parametrize("stream", [True, False])
def test_prompt_and_reply_are_told_as_raw_tokens(client: OpenAI, served: Running, stream: bool) -> None:
    more = {**SEED, "enable_response_messages": True}
    got: Any = client.responses.create(**ASKED, input="hi", stream=stream, extra_body=more)
    reply = list(got)[-1].response if stream else got
    (before,), (after,) = reply.input_messages, reply.output_messages
    assert before["type"] == after["type"] == "raw_message_tokens"
    assert before["message"] == "user: hiassistant:"
    assert after["message"] == reply.output_text
    assert (len(before["tokens"]), len(after["tokens"])) == (reply.usage.input_tokens, reply.usage.output_tokens)
    plain = client.responses.create(**ASKED, input="hi", extra_body=SEED)
    assert not {"input_messages", "output_messages"} & plain.model_dump().keys()
