"""Calls of functions: read however the text is cut, and streamed piece by piece as OpenAI's client adds them up."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import LengthFinishReasonError, OpenAI

from cli_checks import Pair
from sametoken import LLM, embedded
from sametoken.server.speech import Message, ReplyReader
from sametoken.server.tools import CallReader
from server_checks import MODEL, Running, openai_client, running, with_template

NAMES = {"f", "g"}
ONE = '{"name": "f", "arguments": {"x": 1}}'
TWO = '{"name": "g", "arguments": {"x": "a } ] \\" b", "y": [{}]}}'
F, G = ("f", '{"x": 1}'), ("g", '{"x": "a } ] \\" b", "y": [{}]}')
READ: list[tuple[str, str, list[tuple[str, str]]]] = [
    (f"<tool_call>\n{ONE}\n</tool_call>", "", [F]),
    (f"Let me see.\n<tool_call>{ONE}</tool_call>\n<tool_call>{TWO}</tool_call>", "Let me see.", [F, G]),
    (f"<tool_call>[{ONE}, {TWO}]</tool_call>\n", "", [F, G]),
    (f"<tool_call>{ONE}</tool_call>\nDone. ", "\nDone.", [F]),
    ('{"name": "g", "parameters": {}}', "", [("g", "{}")]),
    (' {"parameters": {"x":1}, "name": "g"} ', "", [("g", '{"x": 1}')]),
    ('{"name": "g"}', "", [("g", "{}")]),
    ('{"name": "g", "arguments": {"a":1}, "id": "}"}', "", [("g", '{"a":1}')]),
    ('<|python_tag|>{"name": "g", "parameters": {}}; {"name": "f", "arguments": "{}"}', "", [("g", "{}"), ("f", "{}")]),
    (f"[TOOL_CALLS][{ONE}, {TWO}]", "", [F, G]),
    ('<tool_call>{"name": "f", "arguments": {"x": [1, ', "", [("f", '{"x": [1, ')]),
    ('<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_', "", [F]),
    (f"{ONE} and more", "and more", [F]),
    ('{"name": "unknown", "parameters": {}}', '{"name": "unknown", "parameters": {}}', []),
    ('<tool_call>{"name": "no", "parameters": {}}</tool_call> x', None, []),  # type: ignore[list-item]
    ('<tool_call>{"name": "f", "arg</tool_call>', None, []),  # type: ignore[list-item]
    ('{"name": "f", "arg', None, []),  # type: ignore[list-item]
    ("[1, 2]", None, []),  # type: ignore[list-item]
    ("<tool_call></tool_call>", None, []),  # type: ignore[list-item]
    ("<tool_caller> text <tool", None, []),  # type: ignore[list-item]
    ("[TO", None, []),  # type: ignore[list-item]
    ("  {", None, []),  # type: ignore[list-item]
    (f"```json\n{ONE}\n```", "", [F]),
    (f"```json\n[{ONE},\n {TWO}]\n```\n", "", [F, G]),
    (f"```\n{ONE}\n```\n```json\n{TWO}\n```", "", [F, G]),
    (f"```tool_call\n{ONE}\n```\nDone.", "Done.", [F]),
    (f"```json\n{ONE}", "", [F]),
    ('```json\n{"a": 1}\n```', None, []),  # type: ignore[list-item]
    ("```python\nprint(1)\n```", None, []),  # type: ignore[list-item]
    (f"Sure! Here it is:\n\n```json\n{ONE}\n```", "Sure! Here it is:", [F]),
    (f"One:\n```json\n{ONE}\n```\nand two.\n```tool_call\n{TWO}\n```", "One:\nand two.", [F, G]),
    (f"Both:\n```json\n{ONE}\n{TWO}\n```\nDone.", "Both:\nDone.", [F, G]),
    (f"Both:\n```json\n{ONE}\n```\n```json\n{TWO}\n```", "Both:", [F, G]),
    (f"In a line ```json\n{ONE}\n```", None, []),  # type: ignore[list-item]
    (f"As here:\n```python\n{ONE}\n```", None, []),  # type: ignore[list-item]
    ('So:\n```json\n{"name": "no", "arguments": {}}\n```', None, []),  # type: ignore[list-item]
    ("So:\n```json\n```\n```jsonc\n[]\n```", None, []),  # type: ignore[list-item]
    ("```js", None, []),  # type: ignore[list-item]
    ("just text \n", None, []),  # type: ignore[list-item]
    ("", None, []),  # type: ignore[list-item]
]


def added(texts: Sequence[str], several: bool = True) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls that the deltas of these texts add up to, as a client adds them."""
    reader, message = CallReader(NAMES, several), Message()
    content, calls = "", {}
    for at, text in enumerate(texts):
        delta = message.add(reader.feed(text, done=at == len(texts) - 1))
        content += delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            whole = calls.setdefault(call["index"], {"name": "", "arguments": ""})
            assert ("id" in call) == ("name" in call["function"])
            for key, value in call["function"].items():
                whole[key] += value
    assert message.to_json()["content"] == (content or (None if calls else ""))
    return content, [(call["name"], call["arguments"]) for _, call in sorted(calls.items())]


@pytest.mark.parametrize(("text", "content", "calls"), READ)
def test_calls_are_read_in_the_ways_models_write_them(text: str, content: str | None, calls: list[Any]) -> None:
    expected = (text if content is None else content, calls)
    assert added([text]) == expected
    assert added([*text, ""]) == expected
    one = added([*text, ""], several=False)
    assert one == added([text], several=False)
    assert one[1] == calls[:1]


SIGNS = ["```", "```json\n", "<tool_call>", "</tool_call>", "{", "}", '"', "\\", "[", ",", " ", "a"]
PARTS = [*(text for text, _, _ in READ), ONE, TWO, *SIGNS]


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(PARTS), max_size=5), st.lists(st.integers(1, 9), max_size=60), st.booleans())
def test_how_a_text_is_cut_changes_nothing(parts: list[str], sizes: list[int], several: bool) -> None:
    text, cut, at = "".join(parts), [], 0
    for size in sizes:
        cut.append(text[at : at + size])
        at += size
    assert added([*cut, text[at:]], several) == added([text], several)


def test_a_long_object_that_is_no_call_takes_no_longer_than_it_is() -> None:
    text = '{"a": [' + '"' + "b" * 60_000 + '"]}'
    began = time.perf_counter()
    assert added([*text, ""]) == (text, [])
    assert time.perf_counter() - began < 20  # with work that grows with the square it is minutes


@pytest.mark.parametrize("text", ['{"version": 1, ', '{"name": "web-app", "version": 1, ', '["name"'])
def test_json_in_a_fence_that_is_no_call_does_not_wait_for_its_end(text: str) -> None:
    reader = CallReader(NAMES)
    text = f"The file:\n```json\n{text}"
    assert "".join(piece.text for piece in reader.feed(text)) == text.rstrip()


def test_without_functions_all_is_text() -> None:
    assert [piece.text for piece in ReplyReader().feed(0, ONE, done=False)] == [ONE]


TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}assistant:"
)
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
NONE = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": CITY}},
    {"type": "function", "function": {"name": "stop", "parameters": NONE}},
]
ASKED: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 200}


@pytest.fixture(scope="module", params=["bare", "tagged"])
def served(
    request: Any, tiny_pair: Pair, tmp_path_factory: pytest.TempPathFactory, one_thread: None
) -> Iterator[Running]:
    # Letters alone cannot spell the newlines around tags.
    bare = request.param == "bare"
    template = TEMPLATE + ("" if bare else "{# <tool_call> #}")
    model = tiny_pair.target if bare else str(embedded.TARGET)
    target = with_template(model, tmp_path_factory.mktemp("target"), template)
    drafts = {"max_draft_len": 6, "adaptive": False}
    with running(LLM(target, speculative=drafts)) as server:
        yield server


@pytest.fixture
def client(served: Running) -> Iterator[OpenAI]:
    with openai_client(served) as made:
        yield made


def called(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or []]


def made(items: Sequence[Any]) -> list[tuple[str, str]]:
    return [(item.name, item.arguments) for item in items if item.type == "function_call"]


def accumulated(client: OpenAI, asked: dict[str, Any]) -> tuple[list[Any], Any]:
    """The chunks of a stream, and the choice that OpenAI's own accumulator makes of them."""
    with client.chat.completions.stream(**asked) as stream:
        chunks = [event.chunk for event in stream if event.type == "chunk"]
        try:
            return chunks, stream.get_final_completion().choices[0]
        except LengthFinishReasonError as error:
            return chunks, error.completion.choices[0]


@pytest.mark.cover
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("parallel", [True, False])
def test_streamed_calls_add_up_to_the_reply(served: Running, client: OpenAI, choice: Any, parallel: bool) -> None:
    counts = []
    for seed in range(12):
        asked = {**ASKED, "seed": seed, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": parallel}
        whole = client.chat.completions.create(**asked).choices[0]
        expected = called(whole.message)
        chunks, final = accumulated(client, asked)
        assert called(final.message) == expected
        assert final.finish_reason == whole.finish_reason
        complete = whole.finish_reason == "tool_calls"
        assert (final.message.content or None) == whole.message.content
        assert whole.message.content is None or not complete
        added = [event.choices[0].delta.model_dump(exclude_none=True) for event in chunks if event.choices]
        assert all(added[1:-1]), "an event without anything new"
        deltas = [call for c in chunks for choice_ in c.choices for call in choice_.delta.tool_calls or []]
        # Arguments come as they are made, several tokens of which may come at once.
        assert len(deltas) > len(expected) or not any(name == "weather" for name, _ in expected)
        for name, arguments in expected if complete else expected[:-1]:
            assert name in (["weather", "stop"] if choice == "required" else ["weather"])
            assert json.loads(arguments).keys() == ({"city", "days"} if name == "weather" else set())
        assert len({call.id for call in whole.message.tool_calls or []}) == len(expected) > 0
        counts.append(len(expected))
    if not parallel or choice != "required":
        assert max(counts) == 1
    elif served.llm.config.vocab_size < 1000:  # letters, which are drawn almost evenly
        assert max(counts) > 1


def test_calls_of_responses_stream_as_they_are_made(client: OpenAI) -> None:
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    for seed in range(4):
        asked: Any = {"model": MODEL, "input": "hi", "tools": tools, "tool_choice": "required"}
        asked["extra_body"] = {"seed": seed}
        whole = client.responses.create(**asked)
        events = list(client.responses.create(**asked, stream=True))
        last: Any = events[-1]
        expected = made(whole.output)
        assert made(last.response.output) == expected
        done = [event for event in events if event.type == "response.function_call_arguments.done"]
        assert [(event.name, event.arguments) for event in done] == expected
        pieces = [event for event in events if event.type == "response.function_call_arguments.delta"]
        for event in done:
            mine = [piece.delta for piece in pieces if piece.item_id == event.item_id]
            assert "".join(mine) == event.arguments
        assert len(pieces) > len(expected) or not any(name == "weather" for name, _ in expected)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        if whole.status == "completed":
            with client.responses.stream(**asked) as stream:
                final = stream.get_final_response()
            assert made(final.output) == expected
