"""Replies of a required form and calls of functions, through OpenAI's client; streams equal replies."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from openai import OpenAI

from cli_checks import Pair
from sametoken import LLM, RequestSpeculation, SamplingParams
from sametoken.engine import grammar
from sametoken.server.tools import CallReader, call_tag
from sametoken.speculation.structure import StructuredOutputs
from server_checks import MODEL, Running, openai_client, running, with_template

TEMPLATE = (
    "{% if tools %}tools: {% for t in tools %}{{ t.function.name }} {% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls %}{{ c.function.arguments.city }}"
    "{% endfor %}{% endfor %}assistant:"
)
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": CITY}},
    {
        "type": "function",
        "function": {"name": "stop", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
    },
]
ASKED: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "seed": 4, "max_tokens": 90}


@pytest.fixture(scope="module")
def served(tiny_pair: Pair, tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Iterator[Running]:
    target = with_template(tiny_pair.target, tmp_path_factory.mktemp("target"), TEMPLATE)
    with running(LLM(target, speculative={"max_draft_len": 6, "adaptive": False})) as server:
        yield server


@pytest.fixture
def client(served: Running) -> Iterator[OpenAI]:
    with openai_client(served) as made:
        yield made


SCHEMA = {
    "name": "answer",
    "strict": True,
    "schema": {**CITY, "properties": {"city": {"type": "string", "maxLength": 5}}},
}


FORMAT = {"type": "tag", "begin": "<f=", "content": {"type": "regex", "pattern": "[0-9]{3}"}, "end": ">"}
TAGGED = re.compile("<f=[0-9]{3}>")
SQL = """
    root ::= select_statement
    select_statement ::= "SELECT " column " from " table " where " condition
    column ::= "col_1 " | "col_2 "
    table ::= "table_1 " | "table_2 "
    condition ::= column "= " number
    number ::= "1 " | "2 "
"""
LEGACY = {
    "type": "structural_tag",
    "structures": [{"begin": "a=", "schema": {"type": "integer"}, "end": ";"}],
    "triggers": ["a"],
}
MARK = re.compile("a[^=]|a=(?!-?[0-9]|$|-$)")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "structural_tag", "format": FORMAT}},
        {"structured_outputs": {"structural_tag": json.dumps({"type": "structural_tag", "format": FORMAT})}},
    ],
)
def test_a_structural_tag_is_kept_with_and_without_drafts(
    served: Running, stream: bool, fields: dict[str, Any]
) -> None:
    texts = []
    for speculative in ({"enabled": False}, {"method": "ngram"}, {}):
        reply = served.post("/v1/chat/completions", {**ASKED, **fields, "stream": stream, "speculative": speculative})
        if stream:
            events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
            texts.append("".join(event["choices"][0]["delta"].get("content") or "" for event in events))
        else:
            texts.append(reply.json()["choices"][0]["message"]["content"])
    assert TAGGED.fullmatch(texts[0])
    assert len(set(texts)) == 1


@pytest.mark.parametrize(
    ("fields", "place", "words"),
    [
        ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs", "got no JSON"),
        ({"structured_outputs": {"structural_tag": "[]"}}, "structured_outputs", "expected a structural tag"),
        ({"response_format": {**LEGACY, "triggers": []}}, "response_format", "triggers: got []"),
        ({"response_format": {**LEGACY, "triggers": ["b"]}}, "response_format", 'begin: got "a="'),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "format or structures and triggers"),
        ({"response_format": {**LEGACY, "format": FORMAT}}, "response_format", "format or structures and triggers"),
        (
            {"response_format": {**LEGACY, "structures": [{"begin": "a", "schema": {"type": "no"}, "end": ""}]}},
            "response_format",
            "no",
        ),
    ],
)
def test_what_is_no_structural_tag_is_refused_in_words(
    served: Running, fields: dict[str, Any], place: str, words: str
) -> None:
    for stream in (False, True):
        reply = served.post("/v1/chat/completions", {**ASKED, **fields, "stream": stream})
        error = reply.json()["error"]
        assert (reply.status_code, error["param"].split(".")[0]) == (400, place)
        assert words in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_format_is_kept(client: OpenAI, stream: bool) -> None:
    form: Any = {"type": "json_schema", "json_schema": SCHEMA}
    if stream:
        chunks = client.chat.completions.create(**ASKED, response_format=form, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    else:
        text = client.chat.completions.create(**ASKED, response_format=form).choices[0].message.content or ""
    assert list(json.loads(text)) == ["city"]


@pytest.mark.parametrize(
    ("form", "check"),
    [
        (
            {"response_format": {"type": "regex", "regex": "[a-c]{3}"}},
            lambda text: len(text) == 3 and set(text) <= set("abc"),
        ),
        ({"response_format": {"type": "grammar", "grammar": 'start: "x" "y"'}}, lambda text: text == "xy"),
        ({"guided_grammar": 'root ::= "x" y\ny ::= "y"'}, lambda text: text == "xy"),
        ({"structured_outputs": {"grammar": 'start: "::=" "x"'}}, lambda text: text == "::=x"),
        ({"structured_outputs": {"grammar": SQL}}, re.compile("SELECT col_[12]  from table_[12]  where col_.*").match),
        ({"structured_outputs": {"choice": ["left", "right"]}}, lambda text: text in ("left", "right")),
        ({"response_format": {"type": "text"}}, lambda text: len(text) > 8),
        ({"response_format": {"type": "structural_tag", "format": FORMAT}}, TAGGED.fullmatch),
        ({"structured_outputs": {"structural_tag": json.dumps({"format": FORMAT})}}, TAGGED.fullmatch),
        ({"response_format": LEGACY}, lambda text: not MARK.search(text)),
    ],
)
def test_forms_of_completions(served: Running, form: dict[str, Any], check: Any) -> None:
    body = {"prompt": "abc", "seed": 1, "max_tokens": 48, "ignore_eos": True, **form}
    assert check(served.post("/v1/completions", body).json()["choices"][0]["text"])


def test_forced_tokens_cost_no_forwards(served: Running) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": {"a long key": "and its value"}}}}
    body = {**ASKED, "response_format": form, "speculative": {"report": True}}
    choice = served.post("/v1/chat/completions", body).json()["choices"][0]
    stats = choice["speculative"]["stats"]
    assert json.loads(choice["message"]["content"]) == {"a long key": "and its value"}
    assert stats["drafted_by"]["forced"] > 0
    assert stats["acceptance_length"] > 4


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "regex", "regex": "[oops"}},
        {"response_format": {"type": "regex", "grammar": "x"}},
        {"guided_grammar": "root ::= ("},
        {"response_format": {"type": "xml"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}},
        {"response_format": {"type": "json_object"}, "min_tokens": 3},
        {"response_format": {"type": "json_object"}, "structured_outputs": {"json_object": True}},
        {"structured_outputs": {"choice": []}},
        {"structured_outputs": {"jsn": {}}},
        {"tools": []},
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        {"tool_choice": "auto"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "fly"}}},
    ],
    ids=lambda fields: json.dumps(fields)[:60],
)
def test_forms_and_tools_that_make_no_sense_are_refused(client: OpenAI, fields: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(**ASKED, extra_body=fields)


def test_a_call_between_tags_is_made_by_a_vocabulary_that_can_spell_them() -> None:
    llm = LLM("embedded", speculative={"method": "none", "adaptive": False})
    functions = [tool["function"] for tool in TOOLS]
    form = StructuredOutputs(structural_tag=call_tag(functions, tagged=True))
    plain = RequestSpeculation(enabled=False)
    for seed in range(3):
        asked = {"structured_outputs": form, "seed": seed, "max_tokens": 80}
        done = llm.generate("Call it.", SamplingParams(**asked))[0]
        kinds = [piece.kind for piece in CallReader(["weather", "stop"]).feed(done.text, done=True)]
        assert kinds == ["call", "arguments"]
        assert done.text.startswith("<tool_call>\n{")
        assert done.speculation.acceptance_length > 1.5
        assert llm.generate("Call it.", SamplingParams(**asked, speculative=plain))[0].token_ids == done.token_ids


def test_a_reply_that_is_no_call_is_text_and_tools_reach_the_template(client: OpenAI, served: Running) -> None:
    plain = client.chat.completions.create(**ASKED)
    offered = client.chat.completions.create(**ASKED, tools=TOOLS)
    ignored = client.chat.completions.create(**ASKED, tools=TOOLS, tool_choice="none")
    assert offered.usage is not None
    assert plain.usage is not None
    assert offered.usage.prompt_tokens == plain.usage.prompt_tokens + len("tools: weather stop ")
    assert offered.choices[0].message.tool_calls is None
    assert ignored.choices[0].message.content == plain.choices[0].message.content
    chunks = client.chat.completions.create(**ASKED, tools=TOOLS, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == offered.choices[0].message.content


def test_a_conversation_with_a_call_is_rendered_with_objects(served: Running) -> None:
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    tokens = served.post("/tokenize", {"messages": messages}).json()["tokens"]
    assert served.post("/detokenize", {"tokens": tokens}).json()["prompt"] == "assistant: Rometool: sunnyassistant:"


@pytest.mark.parametrize("stream", [False, True])
def test_a_mask_that_takes_too_long_is_an_error_of_the_request(
    served: Running, client: OpenAI, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    form: Any = {"type": "regex", "regex": "[a-f]{15}"}
    client.chat.completions.create(**ASKED, response_format=form)
    prepare = grammar.TokenGrammar.prepare

    def prepared(self: grammar.TokenGrammar) -> None:
        monkeypatch.setattr(grammar, "MASK_SECONDS", 1.0)
        prepare(self)
        monkeypatch.setattr(grammar, "MASK_SECONDS", -1.0)

    monkeypatch.setattr(grammar.TokenGrammar, "prepare", prepared)
    reply = served.post("/v1/chat/completions", {**ASKED, "response_format": form, "stream": stream})
    assert reply.status_code == (200 if stream else 400)
    events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    error = json.loads(events[-2])["error"] if stream else reply.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "response_format")
    assert "took" in error["message"]
    assert served.get("/health").status_code == 200


def test_heavy_grammars_do_not_hold_up_a_stream(served: Running, client: OpenAI) -> None:
    """Eight at once, of the kind that once held all streams up for half a minute."""

    def heavy(number: int) -> int:
        form = {"type": "regex", "regex": f"((c{{1000}}){{1000}}){{{900 + number}}}"}
        return served.post("/v1/chat/completions", {**ASKED, "response_format": form}).status_code

    pauses = []
    for _ in range(3):  # other programs of a loaded machine make pauses too
        with ThreadPoolExecutor(8) as pool:
            refused = [pool.submit(heavy, number) for number in range(8)]
            last, longest = time.perf_counter(), 0.0
            while not all(each.done() for each in refused):
                options = {"max_tokens": 60, "extra_body": {"ignore_eos": True}}
                for _chunk in client.chat.completions.create(**{**ASKED, **options}, stream=True):
                    longest, last = max(longest, time.perf_counter() - last), time.perf_counter()
        assert [each.result() for each in refused] == [400] * 8
        pauses.append(longest)
        if longest < 0.3:
            break
    assert min(pauses) < 0.3, pauses
