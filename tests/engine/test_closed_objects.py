"""Objects of JSON schemas have only the properties that the schemas list for them."""

from __future__ import annotations

import json
import random
from itertools import permutations
from typing import Any

import jsonschema_rs
import llguidance
import pytest

from sametoken.engine.closed_objects import closed
from sametoken.engine.grammar_trial import LLGUIDANCE, source

INT: dict[str, Any] = {"type": "integer"}
FORMS = dict.fromkeys(("json_object", "json", "regex", "choice", "structural_tag", "grammar"))
Schema = dict[str, Any]


class _Bytes:
    """Vocabulary of single bytes, in the interface of llguidance."""

    bos_token_id, eos_token_id = None, 256
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")
    special_token_ids = (256,)

    def __call__(self, piece: bytes | str) -> list[int]:
        return list(piece.encode() if isinstance(piece, str) else piece)


WORDS = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()), n_vocab=257)


def matcher(schema: Any) -> Any:
    spelled = source(llguidance.LLMatcher, {**FORMS, "json": schema}, ())
    return llguidance.LLMatcher(
        WORDS, spelled, log_level=0, limits=llguidance.LLParserLimits(verbose_errors=False, **LLGUIDANCE)
    )


def accepts(begun: Any, text: str) -> bool:
    made = begun.deep_copy()
    assert not made.is_error(), made.get_error()
    return bool(made.consume_tokens(list(text.encode())) and made.is_accepting())


def drawn(begun: Any, draws: random.Random) -> str | None:
    """Text drawn from a grammar, byte by byte; None for one that does not end."""
    made, tokens = begun.deep_copy(), bytearray()
    while not made.is_stopped() and len(tokens) < 200:
        mask = made.compute_bitmask()
        allowed = [token for token in range(257) if mask[token // 8] >> token % 8 & 1]
        if not allowed:
            return None
        # Of texts and numbers the shorter ones; of keys all.
        ends = [token for token in allowed if token == 256 or chr(token) in '}]",']
        token = draws.choice(ends if ends and draws.random() < 0.5 else allowed)
        made.consume_token(token)
        if token < 256:
            tokens.append(token)
    return tokens.decode() if made.is_stopped() else None


def of(*names: str, need: str = "", **more: Any) -> Schema:
    """Schema of an object that lists properties."""
    properties = dict.fromkeys(names, INT)
    return {"type": "object", "properties": properties, **({"required": list(need)} if need else {}), **more}


NODE = of("v", "next")
NODE["properties"]["next"] = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}
KIND = [of(name, need="k" + name) for name in "ab"]
for name, each in zip("ab", KIND, strict=True):
    each["properties"] = {"k": {"const": name}, **each["properties"]}
# Schemas, texts that they have, and texts that they do not have although JSON Schema would allow them.
CASES: dict[str, tuple[Any, list[str], list[str]]] = {
    "listed": (of("a", "b"), ["{}", '{"a": 1, "b": 2}', '{"b": 2}'], ['{"c": 1}', '{"a": 1, "c": 2}']),
    "none listed": (of(), ["{}"], ['{"a": 1}']),
    "no properties": ({"type": "object"}, ["{}", '{"a": 1}'], []),
    "required alone": ({"type": "object", "required": ["a"]}, ['{"a": 1, "b": 2}'], []),
    "required besides": (of("a", need="z"), ['{"a": 1, "z": "x"}'], ['{"z": 1, "y": 2}']),
    "open": (of("a", additionalProperties=True), ['{"a": 1, "c": 2}'], []),
    "open by a schema": (of("a", additionalProperties=INT), ['{"a": 1, "c": 2}'], []),
    "map": ({"type": "object", "additionalProperties": INT}, ['{"a": 1, "c": 2}'], []),
    "patterns": (of("a", patternProperties={"^x": INT}), ['{"a": 1, "x1": 2}'], ['{"b": 1}']),
    "patterns alone": ({"type": "object", "patternProperties": {"^x": INT}}, ['{"x1": 2, "b": 1}'], []),
    "more than listed": (of("a", need="a", minProperties=2), ['{"a": 1, "b": 2}'], []),
    "a value of its own": ({**of("a"), "enum": [{"a": 1, "b": 2}]}, ['{"a": 1, "b": 2}'], []),
    "inside": ({"type": "array", "items": of("a")}, ['[{"a": 1}, {}]'], ['[{"b": 1}]']),
    "inside an open one": (
        of(additionalProperties=of("a")), ['{"x": {"a": 1}}'], ['{"x": {"b": 1}}'],
    ),
    "allOf": ({"allOf": [of("a"), of("b")]}, ['{"a": 1, "b": 2}', "{}"], ['{"a": 1, "c": 2}']),
    "allOf beside": ({**of("c"), "allOf": [of("a")]}, ['{"c": 1, "a": 2}'], ['{"d": 1}']),
    "allOf with an open part": (
        {"allOf": [of("a"), of("b", additionalProperties=True)]}, ['{"a": 1, "b": 2, "c": 3}'], [],
    ),
    "allOf with patterns": (
        {"allOf": [of("a"), {"patternProperties": {"^x": INT}}]}, ['{"a": 1, "x": 2}'], ['{"b": 1}'],
    ),
    "anyOf": ({"anyOf": [of("a"), of("b")]}, ['{"a": 1}', '{"b": 1}'], ['{"a": 1, "b": 2}', '{"c": 1}']),
    "anyOf beside": (
        {**of("c"), "anyOf": [of("a"), of("b")]},
        ['{"c": 1, "a": 2}', '{"c": 1, "b": 2}'], ['{"c": 1, "a": 1, "b": 2}'],
    ),
    "anyOf of requirements": (
        of("a", "b", anyOf=[{"required": ["a"]}, {"required": ["b"]}]),
        ['{"a": 1}', '{"b": 1}', '{"a": 1, "b": 2}'], ['{"a": 1, "c": 2}'],
    ),
    "anyOf with an open part": (
        {"anyOf": [of("a"), of("b", need="b", additionalProperties=True)]},
        ['{"a": 1}', '{"b": 1, "c": 2}'], ['{"c": 1}'],
    ),
    "anyOf twice": (
        {"allOf": [{"anyOf": [of("a"), of("b")]}, {"anyOf": [of("c"), of("d")]}]},
        ['{"a": 1, "c": 2}', '{"b": 1, "d": 2}'], ['{"a": 1, "b": 2}', '{"a": 1, "e": 2}'],
    ),
    "oneOf by a kind": (
        {"oneOf": KIND}, ['{"k": "a", "a": 1}', '{"k": "b", "b": 1}'], ['{"k": "a", "a": 1, "b": 1}'],
    ),
    "oneOf by requirements": (
        {"oneOf": [of("a", need="a"), of("b", need="b")]},
        ['{"a": 1}', '{"b": 1}'], ['{"a": 1, "b": 2}', '{"a": 1, "c": 1}'],
    ),
    "oneOf by types": ({"oneOf": [{"type": "null"}, of("a")]}, ["null", '{"a": 1}'], ['{"b": 1}']),
    "$ref": ({"$ref": "#/$defs/x", "$defs": {"x": of("a")}}, ['{"a": 1}'], ['{"b": 1}']),
    "$ref beside": (
        {**of("c"), "$ref": "#/$defs/x", "$defs": {"x": of("a")}}, ['{"c": 1, "a": 2}'], ['{"c": 1, "b": 2}'],
    ),
    "$ref alone and as a part": (
        {**of("x", "y"), "$defs": {"x": of("a")}, "properties": {
            "x": {"$ref": "#/$defs/x"}, "y": {"allOf": [{"$ref": "#/$defs/x"}, of("b")]}}},
        ['{"x": {"a": 1}, "y": {"a": 1, "b": 2}}'], ['{"x": {"b": 1}}', '{"y": {"c": 1}}'],
    ),
    "a circle": (
        {"$ref": "#/$defs/node", "$defs": {"node": NODE}}, ['{"v": 1, "next": {"v": 2, "next": null}}'],
        ['{"v": 1, "next": {"w": 2}}'],
    ),
    "its own root": (
        {**of("v"), "properties": {"v": INT, "next": {"$ref": "#"}}},
        ['{"v": 1, "next": {"v": 2}}'], ['{"next": {"w": 1}}'],
    ),
    "identifiers": (
        {"$id": "https://example.com/a/b", **of("x", "y", "z"), "properties": {
            "x": {"$ref": "c"}, "y": {"$ref": "#here"}, "z": {"$ref": "https://example.com/a/b#/$defs/q/$defs/d"}},
         "$defs": {"q": {"$id": "c", **of("m"), "$defs": {"d": of("n")}}, "p": {"$anchor": "here", **of("o")}}},
        ['{"x": {"m": 1}, "y": {"o": 1}, "z": {"n": 1}}'], ['{"x": {"o": 1}}', '{"z": {"m": 1}}'],
    ),
    "a property of that name": (
        of("properties", "$ref", "$id"), ['{"properties": 1, "$ref": 2}'], ['{"a": 1}'],
    ),
    "a value like a schema": ({"const": {"properties": {"a": 1}}}, ['{"properties": {"a": 1}}'], []),
    "any value": ({}, ["1", '{"a": 1}'], []),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_an_object_has_only_listed_properties(case: str) -> None:
    schema, texts, others = CASES[case]
    made = matcher(schema)
    for text in texts:
        jsonschema_rs.validate(schema, json.loads(text))
        assert accepts(made, text), text
    for text in others:
        assert not accepts(made, text), text


def test_the_order_of_properties_stays() -> None:
    for schema in ({"allOf": [of("b"), of("a")]}, {"anyOf": [of("b", need="b")], **of("a")}):
        assert accepts(matcher(schema), '{"b": 1, "a": 2}')
        assert not accepts(matcher(schema), '{"a": 2, "b": 1}')


def test_a_closed_oneof_has_no_text_of_two_of_its_schemas() -> None:
    """Without the check, {"a": 1} would be a text of the first schema alone, and is one of both by JSON Schema."""
    for schemas in ([of("a", need="a"), of("b")], [of("x"), of("x")]):
        schemas[0]["properties"] |= {"x": of("p", need="p")}
        schemas[1]["properties"] |= {"x": of("q")}
        made = closed({"oneOf": schemas})
        assert "additionalProperties" not in json.dumps(made)


@pytest.mark.parametrize(
    "reference", ["#/nope", "https://example.com/other", "#nowhere", "file:///etc/passwd", "#/$defs/0"]
)
def test_a_reference_that_leads_out_is_named(reference: str) -> None:
    with pytest.raises(ValueError, match=rf"\$ref: got .*{reference[-5:]}.* expected a part of the same schema"):
        closed({"$ref": reference, "$defs": []})


def test_combinations_without_end_are_refused() -> None:
    """Each of the definitions applies the next one in two contexts, so that the contexts double."""
    depth = 40
    definitions = {
        str(at): {"anyOf": [{"allOf": [{"$ref": f"#/$defs/{at + 1}"}, of(f"{way}{at}")]} for way in "ab"]}
        for at in range(depth)
    }
    schema = {"$ref": "#/$defs/0", "$defs": {**definitions, str(depth): of("z")}}
    with pytest.raises(ValueError, match="too many properties"):
        closed(schema)


def random_schema(draws: random.Random, definitions: int, depth: int = 3) -> Schema:
    """Schema of an object, with parts."""
    made: Schema = {"type": "object"} if draws.random() < 0.8 else {}
    if draws.random() < 0.7:
        names = draws.sample("abcdef", draws.randint(0, 3))
        inner = draws.random() < 0.2 and depth > 0
        made["properties"] = {
            name: random_schema(draws, definitions, 0) if inner else draws.choice([INT, True, {"enum": ["x", "y"]}])
            for name in names
        }
        if names and draws.random() < 0.5:
            made["required"] = draws.sample(names, draws.randint(1, len(names)))
    for key in draws.sample(("allOf", "anyOf", "oneOf", "$ref"), draws.randint(0, 2)) if depth else ():
        if key == "$ref":
            made[key] = f"#/$defs/{draws.randrange(definitions)}"
        else:
            made[key] = [random_schema(draws, definitions, depth - 1) for _ in range(draws.randint(1, 2))]
    if draws.random() < 0.1:
        made["additionalProperties"] = draws.choice([True, False, INT])
    items = list(made.items())
    draws.shuffle(items)
    return dict(items)


def listed(value: Any) -> set[str]:
    """Names of all properties that a schema lists anywhere."""
    if isinstance(value, list):
        return set().union(*map(listed, value))
    if not isinstance(value, dict):
        return set()
    return set(value.get("properties", ())).union(*map(listed, value.values()))


def random_root(draws: random.Random) -> Schema:
    schema = random_schema(draws, 2)
    schema["$defs"] = {str(at): random_schema(draws, at, 2 if at else 0) for at in range(2)}
    return schema


@pytest.mark.parametrize("seed", range(4))
def test_drawn_texts_follow_random_schemas(seed: int) -> None:
    draws, found = random.Random(seed), 0
    for _ in range(80):
        schema = random_root(draws)
        made = matcher(schema)
        if made.is_error():
            assert any(word in made.get_error() for word in ("oneOf", "nsatisfiable", "NoExtensionBias"))
            continue
        for _ in range(4):
            text = drawn(made, draws)
            if text is not None:
                assert jsonschema_rs.is_valid(schema, json.loads(text)), (schema, text)
                found += 1
    assert found > 100


def chosen(value: Any, draws: random.Random) -> Any:
    """Schema with one schema of each `anyOf`."""
    if isinstance(value, list):
        return [chosen(each, draws) for each in value]
    if not isinstance(value, dict):
        return value
    made = {key: chosen(each, draws) for key, each in value.items()}
    return {**made, "anyOf": [draws.choice(made["anyOf"])]} if isinstance(made.get("anyOf"), list) else made


@pytest.mark.parametrize("seed", range(4))
def test_texts_without_other_properties_stay(seed: int) -> None:
    """The oracle is `unevaluatedProperties`: an object has no other properties than its schemas list."""
    draws, found, refused = random.Random(seed), 0, 0
    for _ in range(80):
        schema = random_root(draws)
        if (made := matcher(schema)).is_error():
            continue
        ways = ({**chosen(schema, draws), "unevaluatedProperties": False} for _ in range(6))
        strict = [jsonschema_rs.validator_for(way) for way in ways]
        loose = jsonschema_rs.validator_for(schema)
        is_open = "additionalProperties" not in closed(schema) or "additionalProperties" in json.dumps(schema)
        for _ in range(8):
            value = {name: draws.choice([1, "x", {}]) for name in draws.sample("abcdef", draws.randint(0, 3))}
            orders = (dict(order) for order in permutations(value.items()))
            accepted = any(accepts(made, json.dumps(order)) for order in orders)
            if any(each.is_valid(value) for each in strict):
                assert accepted, (schema, value)
                found += 1
            elif loose.is_valid(value) and not is_open and not listed(schema) >= value.keys():
                assert not accepted, (schema, value)
                refused += 1
    assert found > 20
    assert refused > 5
