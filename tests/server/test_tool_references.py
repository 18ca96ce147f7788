"""Calls of tools whose schemas have references: each schema is its own root."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest

from sametoken import LLM, RequestError, SamplingParams
from sametoken.options.sampling import StructuredOutputs
from sametoken.server.tools import call_tag


def tool(name: str, definitions: str, address: dict[str, Any], **more: Any) -> dict[str, Any]:
    schema = {
        "type": "object", "properties": {"to": {"$ref": f"#/{definitions}/Addr"}}, "required": ["to"],
        "additionalProperties": False, definitions: {"Addr": address}, **more,
    }  # fmt: skip
    return {"name": name, "parameters": schema}


STREET = {
    "type": "object",
    "properties": {"zip": {"enum": ["a", "b"]}},
    "required": ["zip"],
    "additionalProperties": False,
}
TOOLS = {
    "defs": [tool("send", "$defs", STREET)],
    "definitions": [tool("send", "definitions", STREET)],
    "equal names": [tool("send", "$defs", STREET), tool("post", "$defs", {"type": "boolean"})],
    "siblings": [tool("send", "$defs", {"type": "boolean"}, properties={"to": {"$ref": "#/$defs/Addr", "title": "x"}})],
    "recursion": [tool("send", "$defs", {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/Addr"}]})],
    "own root": [tool("send", "$defs", {"anyOf": [{"type": "null"}, {"$ref": "#"}]}, required=[])],
    "id": [tool("send", "$defs", STREET, **{"$id": "https://example.com/send"})],
    "name": [tool('sch"ön\\', "$defs", STREET)],
}  # fmt: skip


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("embedded", speculative={"method": "none", "adaptive": False})


@pytest.mark.parametrize("tagged", [True, False])
@pytest.mark.parametrize("kind", TOOLS)
def test_arguments_follow_the_schema_of_their_tool(llm: LLM, kind: str, tagged: bool) -> None:
    tools = TOOLS[kind]
    schemas = {each["name"]: each["parameters"] for each in tools}
    form = StructuredOutputs(structural_tag=call_tag(tools, tagged))
    found = 0
    for seed in range(4):
        done = llm.generate("Call it.", SamplingParams(structured_outputs=form, seed=seed, max_tokens=120))[0]
        if done.finish_reason != "stop":
            continue
        text = done.text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
        call = json.loads(text)
        jsonschema_rs.validate(schemas[call["name"]], call["arguments" if tagged else "parameters"])
        found += 1
    assert found or kind == "own root"  # whose texts seldom end, and which compiled


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "its references go round in a circle; correct"),
        ({"allOf": [{"$ref": "#"}, {}]}, "its references go round in a circle; correct"),
        ({"$ref": "#/$defs/b"}, r"\$ref: got \"#/\$defs/b\", expected a part of the same schema; nothing is fetched"),
        ({"$ref": "file:///etc/passwd"}, "nothing is fetched"),
        ({"$ref": 5}, r"\$ref: got 5, expected a part of the same schema"),
        ({"allOf": [{"$ref": [1]}]}, r"\$ref: got \[1\], expected a part of the same schema"),
        ({"type": "objekt"}, "^structured_outputs: Invalid type: objekt; correct or simplify it$"),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "^structured_outputs: Unsatisfiable schema"),
        ({"if": {}, "then": {}}, '^structured_outputs: Unimplemented keys: \\["if", "then"\\]'),
        ({"type": "string", "pattern": "("}, "regex parse error: .* unclosed group; correct or simplify it$"),
    ],
)
def test_a_schema_that_makes_no_grammar_is_refused_in_words(llm: LLM, parameters: dict[str, Any], words: str) -> None:
    form = StructuredOutputs(structural_tag=call_tag([{"name": "send", "parameters": parameters}], tagged=True))
    with pytest.raises(RequestError, match=words) as refused:
        llm.generate("Call it.", SamplingParams(structured_outputs=form, max_tokens=4))
    assert not any(part in str(refused.value) for part in ("%json", "start:", "send", "NoExtension"))
