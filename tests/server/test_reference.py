"""docs/server.md is what the code says, and every field of a request has a meaning, a type and a place there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import reference

from sametoken.server.fields import Body
from sametoken.server.responses_schema import InputCall, InputMessage, InputOutput

PAGE = Path(__file__).parents[2] / "docs" / "server.md"
BODIES = [body for _, body in reference.BODIES]


def owners(root: type[Body] = Body) -> list[type[Body]]:
    return [each for owner in root.__subclasses__() for each in (owner, *owners(owner))]


def test_the_page_holds_what_the_code_says() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == reference.written(page), "run python scripts/reference.py docs/server.md"


def test_a_page_gets_its_parts_and_keeps_the_rest() -> None:
    page = "# Mine\n<!-- generated: options -->\nBefore.\n<!-- end -->\nText.\n<!-- generated: paths --><!-- end -->\n"
    made = reference.written(page)
    assert made.startswith("# Mine\n<!-- generated: options -->\n\n| option |")
    assert "Before." not in made
    assert "|\n\n<!-- end -->\nText.\n<!-- generated: paths -->\n\n| path |" in made
    assert "| `--port` | integer | `8000` |" in made
    assert "| `POST /v1/completions` | Continue a prompt. |" in made
    with pytest.raises(KeyError, match="nothing"):
        reference.written("<!-- generated: nothing --><!-- end -->")


@pytest.mark.parametrize("body", owners(), ids=lambda body: body.__name__)
def test_every_field_says_what_it_means_in_the_document(body: type[Body]) -> None:
    made = body.model_json_schema()
    assert made["description"]
    assert "Attributes:" not in made["description"]
    assert [name for name, said in made["properties"].items() if not said.get("description")] == []


@pytest.mark.parametrize("body", [*BODIES, InputMessage, InputCall, InputOutput], ids=lambda body: body.__name__)
def test_every_field_of_a_body_stands_in_a_table(body: type[Body]) -> None:
    tables = PAGE.read_text(encoding="utf-8").partition("## Fields")[2].partition("## Keys")[0]
    for name, field in body.model_fields.items():
        assert re.search(rf"[`.]{field.alias or name}`", tables), name


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"type": "integer", "minimum": 1, "maximum": 128}, "integer 1 to 128"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, "number > 0 and <= 1"),
        ({"anyOf": [{"type": "number", "minimum": 0}, {"type": "null"}]}, "number >= 0"),
        ({"type": "array", "items": {"type": "string"}, "maxItems": 3}, "list of at most 3 texts"),
        ({"type": "array", "items": {"type": "string", "maxLength": 9}}, "list of texts of at most 9 characters"),
        ({"type": "array", "items": {"type": "array", "items": {"type": "integer"}}}, "list of lists of integers"),
        ({"type": "object", "maxProperties": 4}, "object of at most 4 keys"),
        ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/Speculative"}]}, "text or object"),
        ({"enum": ["auto", "none"], "type": "string"}, "`auto` or `none`"),
        ({"const": False}, "`false`"),
    ],
)
def test_types_are_said_with_their_ranges(said: dict[str, object], words: str) -> None:
    assert reference.type_in_words(said) == words
