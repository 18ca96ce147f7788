"""Structural tags accept the texts that xgrammar accepts, and refuse what is no tag; see test_structured for drafts."""

from __future__ import annotations

import json
import re
from typing import Any

import llguidance
import pytest

from sametoken import RequestError
from sametoken.engine.structural_tag import KNOWN, lark_of
from sametoken.options.sampling import StructuredOutputs

ANY = {"type": "any_text"}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
JSON = {"type": "json_schema", "json_schema": SCHEMA}
AB = {"type": "const_string", "value": "ab"}


def tag(begin: str, content: dict[str, Any], end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def triggered(triggers: list[str], *tags: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": triggers, "tags": list(tags), **more}


def of(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


CALL = '<f=a>{"a": 1}</f>'
ONE = triggered(["<f"], tag("<f=a>", JSON, "</f>"))
SHORT = tag("<a>", ANY, "</a>")
# Texts that xgrammar 0.2.8 accepts, and texts that it does not.
CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (
        ONE,
        ["", "hi", CALL, f"hi{CALL}", f"{CALL}hi", f"{CALL}hi{CALL}", "<", f"<{CALL}"],
        ["<f=b>", "a<fb", '<f=a>{"a": "x"}</f>', CALL[:-1]],
    ),
    ({**ONE, "at_least_one": True}, [CALL, f"{CALL}hi"], ["", "hi", f"hi{CALL}"]),
    ({**ONE, "stop_after_first": True}, ["", "hi", CALL, f"hi{CALL}"], [f"{CALL}hi"]),
    ({**ONE, "at_least_one": True, "stop_after_first": True}, [CALL], ["", "hi", f"hi{CALL}", f"{CALL}hi"]),
    (
        triggered(["<f", "<g"], tag("<f=a>", ANY, "</f>"), tag("<f=b>", const("x"), "</f>"), tag("<g>", JSON, "</g>")),
        ["a", "<f=a>hi</f>", "<f=b>x</f>", 'z<g>{"a": 1}</g>z<f=b>x</f>q'],
        ["<g", "<f=b>y</f>"],
    ),
    (
        triggered(["<f"], tag("<fun", ANY, "</f>"), excludes=["bad"]),
        ["a", "<funbad</f>", "ba"],
        ["bad", "xbad<funa</f>", "a<funa</f>bad"],
    ),
    (
        tag("<a>", triggered(["<f"], tag("<f>", ANY, "</f>")), "</a>"),
        ["<a>x</a>", "<a>x<f>d</f>s</a>", "<a>x<f>d</a></f>s</a>", "<a>x<g</a>"],
        ["<a>x<f>d</a>"],
    ),
    (SHORT, ["<a>x</a>", "<a></a>", "<a><a></a>"], ["<a>x", "<a>x</a>y"]),
    (tag("<a>", ANY, ["</a>", "</b>"]), ["<a>x</a>", "<a>x</b>"], ["<a>x</c>"]),
    (tag("<a>", const("x"), ""), ["<a>x"], ["<a>"]),
    (of("sequence", elements=[ANY, const("END")]), ["END", "aEND"], ["a", "aEN"]),
    (of("sequence", elements=[of("regex", pattern="a|b"), const("b"), SHORT]), ["bb<a></a>"], ["bbb<a></a>"]),
    (
        of("sequence", elements=[AB, of("or", elements=[const("x"), const("y")]), of("optional", content=const("z"))]),
        ["abx", "aby", "abxz"],
        ["abz", "abxzz"],
    ),
    (
        tag("<t>", of("sequence", elements=[const("k="), of("dispatch", rules=[["!", const("?")]])]), "</t>"),
        ["<t>k=</t>", "<t>k=ab</t>", "<t>k=a!?b</t>"],
        ["<t>k=a!b</t>"],
    ),
    (
        of("tags_with_separator", tags=[SHORT, tag("<b>", JSON, "</b>")], separator=","),
        ["", "<a>x</a>", "<a>x</a>,<a></a>", '<b>{"a": 2}</b>,<a></a>'],
        ["<a>x</a><a></a>", "<a>x</a>,"],
    ),
    (
        of("tags_with_separator", tags=[SHORT], separator=",", stop_after_first=True),
        ["", "<a>x</a>"],
        ["<a></a>,<a></a>"],
    ),
    (of("tags_with_separator", tags=[SHORT], separator=",", at_least_one=True), ["<a>x</a>"], [""]),
    (of("dispatch", rules=[["<f>", const("x")], ["<g>", JSON]]), ["", "<f>x", 'a<f>xb<g>{"a": 1}c<f>x'], ["<f>y"]),
    (of("dispatch", rules=[["<f>", const("x")]], loop=False), ["", "a", "a<f>x"], ["a<f>xb"]),
    (of("or", elements=[const("END"), ANY]), ["END", "aEND", ""], []),
    (of("regex", pattern="a.*b/c?"), ["ab/", "axxb/c"], ["axb"]),
    (tag("<a>", of("regex", pattern="[a-z]*"), "</a>"), ["<a>x</a>", "<a></a>"], ["<a>X</a>"]),
    (of("star", content=AB), ["", "ab", "abab"], ["aba"]),
    (of("plus", content=AB), ["ab", "abab"], ["", "aba"]),
    (of("repeat", min=1, max=2, content=AB), ["ab", "abab"], ["", "ababab"]),
    (of("repeat", min=2, max=-1, content=AB), ["abab", "ababab"], ["ab"]),
    (of("any_text", max_chars=2), ["", "ab", "aé"], ["abc"]),
    (of("any_text", excludes=["no", "x/y"]), ["", "n", "x/"], ["no", "an o no", "ax/yb"]),
    (of("json_schema", json_schema=True), ["1", "{}", '"a"'], ["x"]),
]  # fmt: skip


SPECIAL = ("<|call|>", "<｜end▁of▁call｜>", "[CALL]")


class Bytes:
    """A vocabulary of single bytes, for llguidance."""

    bos_token_id, eos_token_id, special_token_ids = None, 256, (256, *range(257, 257 + len(SPECIAL)))
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>", *(text.encode() for text in SPECIAL))

    def __call__(self, piece: bytes | str) -> list[int]:
        return list(piece.encode() if isinstance(piece, str) else piece)


@pytest.fixture(scope="module")
def vocabulary() -> Any:
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()), n_vocab=257 + len(SPECIAL))


def accepts(vocabulary: Any, grammar: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(vocabulary, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    pieces = re.split(f"({'|'.join(map(re.escape, SPECIAL))})", text)
    ids = [id for at, piece in enumerate(pieces) for id in ([257 + SPECIAL.index(piece)] if at % 2 else piece.encode())]
    return bool(matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting())


@pytest.mark.parametrize(("form", "within", "without"), CASES, ids=lambda each: json.dumps(each)[:60])
def test_texts_of_a_tag(vocabulary: Any, form: dict[str, Any], within: list[str], without: list[str]) -> None:
    grammar = lark_of({"type": "structural_tag", "format": form})
    assert [text for text in within if not accepts(vocabulary, grammar, text)] == []
    assert [text for text in without if accepts(vocabulary, grammar, text)] == []


def test_a_special_token_in_a_mark_is_that_token(vocabulary: Any) -> None:
    call, end = SPECIAL[:2]
    parts = [tag(f"{call}a:", ANY, [end, f"\n{call}"]), tag("<f>", AB, "</f>")]
    grammar = lark_of({"format": triggered([call, "<f"], *parts)}, SPECIAL)
    within = ["", "hi", f"hi{call}a:x{end}ho", f"{call}a:x\ny\n{call}<f>ab</f>{call}a:{end}"]
    without = [f"hi{end}", f"hi{call}b:", f"{call}a:x{call}", "<f>x", f"{call}a:x", f"{call}a:x\ny{call}"]
    assert [text for text in within if not accepts(vocabulary, grammar, text)] == []
    assert [text for text in without if accepts(vocabulary, grammar, text)] == []
    assert "[CALL]" not in lark_of({"format": tag("[CALL]", AB, "")}, SPECIAL).replace('"[CALL]"', "")


def test_structures_and_triggers_are_triggered_tags() -> None:
    structure = {"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}
    legacy = {"type": "structural_tag", "structures": [structure], "triggers": ["<f"]}
    assert lark_of(legacy) == lark_of({"format": ONE})
    assert "%json" in lark_of({"structures": [{**structure, "schema": None}], "triggers": ["<f"]})


def test_every_type_has_a_case_and_a_field_of_null_is_left_out() -> None:
    spelled = json.dumps(CASES)
    assert [kind for kind in KNOWN if f'"type": "{kind}"' not in spelled] == []
    dumped = {**JSON, "style": "json", "any_order": False, "max_whitespace_cnt": None, "excludes": []}
    assert lark_of({"format": dumped}) == lark_of({"format": JSON})


WRONG = [
    ({}, "format: got nothing"),
    ({"type": "json_schema", "format": ANY}, "type: got"),
    ({"format": ANY, "more": 1}, 'got "more"'),
    ({"format": of("token", token=5)}, 'type: got "token", expected one of const_string'),
    ({"format": {}}, "format.type: got null"),
    ({"format": {"type": [1]}}, r"format.type: got \[1\]"),
    ({"format": of("any_text", max_tokens=5)}, 'got "max_tokens", expected no fields but'),
    ({"format": of("json_schema", json_schema=SCHEMA, style="qwen_xml")}, 'style: got "qwen_xml"'),
    ({"format": triggered([], tag("<f>", ANY, "</f>"))}, "triggers: got"),
    ({"format": triggered(["<g"], tag("<f>", ANY, "</f>"))}, r'tags\[0\].begin: got "<f>"'),
    ({"format": triggered(["<f", "<fu"], tag("<fun", ANY, "</f>"))}, "exactly one of the triggers"),
    ({"format": triggered(["<f", "<g"], tag("<f>", ANY, "</f>"))}, 'triggers: got "<g"'),
    ({"format": triggered(["<f"])}, r"tags: got \[\]"),
    ({"format": triggered(["<f"], ANY)}, r'tags\[0\].type: got "any_text", expected tag'),
    ({"format": tag("<a>", ANY, "")}, "content: got text without an end"),
    ({"format": tag("<a>", ANY, ["", "b"])}, "end: got"),
    ({"format": of("star", content=ANY)}, "content: got text without an end"),
    ({"format": of("sequence", elements=[ANY, JSON])}, r"elements\[0\]: got text without an end"),
    ({"format": of("repeat", min=3, max=2, content=AB)}, "max: got 2"),
    ({"format": of("dispatch", rules=[["a"]])}, "rules: got"),
    ({"structures": [], "triggers": ["<f"]}, "structures: got"),
    ({"structures": [{"begin": "<f", "schema": {}, "end": ""}]}, "triggers: got nothing"),
    ({"structures": [{"begin": "<g", "schema": {}, "end": ""}], "triggers": ["<f"]}, "begin: got"),
    ({"structures": [{"begin": 5, "schema": {}, "end": ""}], "triggers": ["<f"]}, r"structures\[0\].begin: got 5"),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "words"), WRONG, ids=lambda each: json.dumps(each)[:60])
def test_what_is_no_tag_is_refused_by_its_place(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        lark_of(asked)


def test_a_deep_tag_is_refused() -> None:
    deep: dict[str, Any] = ANY
    for _ in range(3000):
        deep = of("optional", content=deep)
    with pytest.raises(ValueError, match="nested too deep"):
        lark_of({"format": deep})


def test_a_tag_is_an_object_or_its_json() -> None:
    asked = {"type": "structural_tag", "format": ONE}
    assert StructuredOutputs(structural_tag=json.dumps(asked)) == StructuredOutputs(structural_tag=asked)
    for wrong in ("{", "[]", "", 5, "[" * 100_000):
        with pytest.raises(RequestError, match=r"structured_outputs\.structural_tag: got"):
            StructuredOutputs(structural_tag=wrong)  # type: ignore[arg-type]
