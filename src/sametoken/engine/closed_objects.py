"""JSON schemas whose objects have only the properties that they list, as llama.cpp and xgrammar read them.

An object is closed if a schema lists `properties` for it and none of the schemas for it has `additionalProperties`.
Several schemas describe one object by `allOf`, `anyOf`, `oneOf`, `$ref` and the keywords next to them, which are called
parts here. Each part is closed over the names of all parts that hold together with it, so none forbids a property that
another lists. Every text of a closed schema is a text of the given one.

This module imports neither torch nor pydantic; it is used by `engine.grammar_trial`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

MOST_WORK = 2**17  # parts and listed names that are visited or written
OWN = ("$ref", "allOf", "anyOf", "oneOf")  # keywords that apply schemas to the value itself
MAPS = ("properties", "patternProperties")  # of schemas for values inside
SCHEMAS = ("additionalProperties", "items", "additionalItems", "prefixItems")  # schemas, or lists of them
DROPPED = ("$defs", "definitions", "$id", "$anchor")  # references are written anew
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


@dataclass(frozen=True)
class Listed:
    """Facts of the schemas that hold together for one value.

    Attributes:
        stated: True if one of them lists `properties`.
        open: True if an object may have properties of any name.
        names: names of properties, in the order of the schemas; the keys of a mapping are a set with an order.
        patterns: patterns of names, likewise.
        least: least number of properties.
        types: possible types.
        required: names that an object must have.
        texts: the possible texts of a property, by name, where its schema states them.
    """

    stated: bool = False
    open: bool = False
    names: Mapping[str, None] = field(default_factory=dict)
    patterns: Mapping[str, None] = field(default_factory=dict)
    least: int = 0
    types: frozenset[str] = frozenset(TYPES)
    required: frozenset[str] = frozenset()
    texts: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @property
    def closes(self) -> bool:
        """True if an object has only the listed properties."""
        enough = bool(self.patterns) or len(self.names) >= self.least
        return self.stated and not self.open and enough and "object" in self.types

    def key(self) -> tuple[Any, ...]:
        """Value that is equal for contexts that close a part in the same way."""
        if self.open:
            return (True,)
        return self.stated, frozenset(self.names), frozenset(self.patterns), self.least


NOTHING = Listed()


def _together(parts: Sequence[Listed]) -> Listed:
    """Facts of parts that all hold."""
    if len(parts) == 1:
        return parts[0]
    names: dict[str, None] = {}
    patterns: dict[str, None] = {}
    texts: dict[str, frozenset[str]] = {}
    for each in parts:
        names |= each.names
        patterns |= each.patterns
        texts |= each.texts
    return Listed(
        stated=any(each.stated for each in parts),
        open=any(each.open for each in parts),
        names=names,
        patterns=patterns,
        least=max((each.least for each in parts), default=0),
        types=frozenset(TYPES).intersection(*(each.types for each in parts)),
        required=frozenset().union(*(each.required for each in parts)),
        texts=texts,
    )


def closed(schema: Any) -> Any:
    """Schema with closed objects and without identifiers; each reference names a place in its `$defs`.

    Raises:
        ValueError: a reference leads out of the schema or round in a circle, or there is too much to close.
    """
    return _Writer(schema).whole() if isinstance(schema, dict) else schema


class _Writer:
    """Writer of one closed schema.

    In every method, `base` is the identifier that references within a schema are relative to. `around` are the facts of
    the other parts of the value, or None within a schema that stays as it is.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self._root, self._work = root, 0
        self._base = ""
        self._places: dict[str, tuple[Any, str]] = {}  # schemas by their identifiers
        self._facts: dict[tuple[int, str], Listed] = {}
        self._within: tuple[tuple[int, str], ...] = ()  # schemas that hold together, down to the one that is read
        self._names: dict[tuple[Any, ...], str] = {}  # names in `$defs`, by schema and context
        self._defs: dict[str, Any] = {}
        self._index(root, "")

    def whole(self) -> dict[str, Any]:
        made: dict[str, Any] = self._written(self._root, "", NOTHING)
        return {**made, "$defs": self._defs} if self._defs else made

    def _spend(self, count: int) -> None:
        self._work += count
        if self._work > MOST_WORK:
            raise ValueError("the schema lists too many properties in too many combinations")

    # References

    def _index(self, value: Any, base: str) -> None:
        """Note the schemas that have identifiers."""
        self._spend(1)
        if isinstance(value, list):
            for each in value:
                self._index(each, base)
        elif isinstance(value, dict):
            base = _base_within(value, base)
            if value is self._root or isinstance(value.get("$id"), str):
                self._places.setdefault(base, (value, base))
            if isinstance(value.get("$anchor"), str):
                self._places.setdefault(f"{base}#{value['$anchor']}", (value, base))
            for each in value.values():
                self._index(each, base)

    def _found(self, reference: Any, base: str) -> tuple[Any, str]:
        """Schema that a reference names, and its base."""
        missing = ValueError(
            f"$ref: got {json.dumps(reference)[:100]}, expected a part of the same schema; nothing is fetched"
        )
        if not isinstance(reference, str):
            raise missing
        if reference.startswith("#"):
            place, fragment = base, reference[1:]
        else:
            place, fragment = urldefrag(urljoin(base, reference))
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            place, fragment = f"{place}#{fragment}", ""
        if place not in self._places:
            raise missing
        value, base = self._places[place]
        for step in fragment.split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(value, dict) and name in value:
                value = value[name]
            elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
                value = value[int(name)]
            else:
                raise missing
            base = _base_within(value, base)
        return value, base

    def _reference(self, given: Any, base: str, around: Listed | None) -> Any:
        """Reference to the schema that a given one names, closed within its context."""
        schema, base = self._found(given, base)
        key = (id(schema), base, None if around is None else around.key())
        if key not in self._names:
            name = self._names[key] = str(len(self._names))
            self._defs[name] = self._written(schema, base, around)
        return f"#/$defs/{self._names[key]}"

    # Facts

    def _parts(self, schema: Mapping[str, Any], base: str) -> list[tuple[str, Listed]]:
        """Facts of each part of a schema with the keyword that applies it, in the order of the keywords."""
        found = [("", self._own(schema, base))]
        for keyword in schema:
            value = schema[keyword]
            if keyword == "$ref":
                found.append((keyword, self._listed(*self._found(value, base))))
            elif keyword == "allOf" and isinstance(value, list):
                found += [(keyword, self._listed(each, base)) for each in value]
            elif keyword in ("anyOf", "oneOf") and isinstance(value, list):
                found.append((keyword, self._either(value, base)))
        return found

    def _either(self, schemas: Sequence[Any], base: str) -> Listed:
        """Facts of a part of which one of several schemas holds."""
        within, self._within = self._within, ()
        facts = [self._listed(each, base) for each in schemas]
        self._within = within
        types = frozenset[str]().union(*(each.types for each in facts))
        least = min((each.least for each in facts), default=0)
        return replace(_together(facts), required=frozenset(), texts={}, types=types, least=least)

    def _listed(self, schema: Any, base: str) -> Listed:
        """Facts of a schema with all of its parts; those of a circle of references count once."""
        if not isinstance(schema, dict):
            return NOTHING
        base = _base_within(schema, base)
        key = (id(schema), base)
        if key in self._within:
            raise ValueError("no text satisfies the schema, since its references go round in a circle")
        if key not in self._facts:
            self._facts[key] = NOTHING
            self._within += (key,)
            self._facts[key] = _together([facts for _, facts in self._parts(schema, base)])
            self._within = self._within[:-1]
        self._spend(1 + len(self._facts[key].names))
        return self._facts[key]

    def _own(self, schema: Mapping[str, Any], base: str) -> Listed:
        """Facts of the keywords of a schema that apply no other schema to the value itself."""
        properties, patterns = (schema[key] if isinstance(schema.get(key), dict) else {} for key in MAPS)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        stated = schema.get("required")
        required = [name for name in stated if isinstance(name, str)] if isinstance(stated, list) else []
        least = schema.get("minProperties", 0)
        fixed = isinstance(values, list) and any(isinstance(value, dict) for value in values)
        others = {key: schema[key] for key in ("additionalProperties", "unevaluatedProperties") if key in schema}
        texts = ((name, self._texts(each, base)) for name, each in properties.items())
        return Listed(
            stated="properties" in schema,
            open=fixed or any(value is not False for value in others.values()),
            names=dict.fromkeys([*properties, *required]) if "properties" in schema else {},
            patterns=dict.fromkeys(patterns),
            least=least if isinstance(least, int) else 0,
            types=_types(schema.get("type"), values),
            required=frozenset(required),
            texts={name: each for name, each in texts if each},
        )

    def _texts(self, schema: Any, base: str) -> frozenset[str]:
        """Texts that are the only values of a schema; none if it has others."""
        for _ in range(8):  # references to references
            if isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
                schema, base = self._found(schema["$ref"], _base_within(schema, base))
        if not isinstance(schema, dict):
            return frozenset()
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        known = isinstance(values, list) and all(isinstance(value, str) for value in values)
        return frozenset(values) if isinstance(values, list) and known else frozenset()

    # Schemas

    def _written(self, schema: Any, base: str, around: Listed | None) -> Any:
        if not isinstance(schema, dict):
            return schema
        base = _base_within(schema, base)
        parts = [] if around is None else self._parts(schema, base)
        inside = None if around is None else NOTHING
        made: dict[str, Any] = {}
        for key, value in schema.items():
            if key in OWN:
                made[key] = self._applied(key, value, base, around, parts)
            elif key in MAPS and isinstance(value, dict):
                made[key] = {name: self._written(each, base, inside) for name, each in value.items()}
            elif key in SCHEMAS:
                several = isinstance(value, list)
                made[key] = (
                    [self._written(each, base, inside) for each in value]
                    if several
                    else self._written(value, base, inside)
                )
            elif key not in DROPPED:
                made[key] = value
        self._spend(1)
        return made if around is None else self._closed(made, around, parts)

    def _applied(
        self, key: str, value: Any, base: str, around: Listed | None, parts: Sequence[tuple[str, Listed]]
    ) -> Any:
        """Value of a keyword that applies schemas to the value itself."""
        if key == "$ref":
            return self._reference(value, base, self._beside(key, around, parts))
        if not isinstance(value, list):
            return value
        if key == "allOf":
            return [self._written(each, base, self._beside(key, around, parts, at)) for at, each in enumerate(value)]
        beside = self._beside(key, around, parts)
        if key == "oneOf" and beside is not None and not self._apart(value, base, beside):
            beside = None  # a text of one closed schema may be a text of another open one
        return [self._written(each, base, beside) for each in value]

    def _beside(
        self, key: str, around: Listed | None, parts: Sequence[tuple[str, Listed]], at: int = 0
    ) -> Listed | None:
        """Facts of all parts but one: the part number `at` of a keyword."""
        if around is None:
            return None
        own = [place for place, (keyword, _) in enumerate(parts) if keyword == key][at]
        others = _together([around, *(facts for place, (_, facts) in enumerate(parts) if place != own)])
        self._spend(len(parts) + len(others.names))
        return others

    def _closed(self, made: dict[str, Any], around: Listed, parts: Sequence[tuple[str, Listed]]) -> dict[str, Any]:
        """Schema with `additionalProperties`, if its object is closed and its parts do not close it."""
        everything = _together([around, *(facts for _, facts in parts)])
        by_parts = "properties" not in made and len(parts) > 1
        if not everything.closes or by_parts or "additionalProperties" in made:
            return made
        self._spend(len(everything.names) + len(everything.patterns))
        for key, names in zip(MAPS, (everything.names, everything.patterns), strict=True):
            if names:
                made[key] = {**made.get(key, {}), **{name: True for name in names if name not in made.get(key, {})}}
        return {**made, "additionalProperties": False}

    def _apart(self, schemas: Sequence[Any], base: str, beside: Listed) -> bool:
        """True if no text of one of the closed schemas is a text of another open one."""
        self._spend(len(schemas) ** 2)
        facts = [self._listed(each, base) for each in schemas]
        return all(_exclude(one, other, beside) for one, other in combinations(facts, 2))


def _exclude(one: Listed, other: Listed, beside: Listed) -> bool:
    """True if two schemas have no text in common where one of them is closed."""
    if not one.types & other.types:
        return True
    if frozenset({"object"}) not in (one.types, other.types):
        return False
    both = one.required & other.required & one.texts.keys() & other.texts.keys()
    if any(not one.texts[name] & other.texts[name] for name in both):
        return True
    return _lacks(one, other.required, beside) and _lacks(other, one.required, beside)


def _lacks(facts: Listed, names: Iterable[str], beside: Listed) -> bool:
    """True if a closed schema has no place for one of the names."""
    every = _together([beside, facts])
    return every.closes and not every.patterns and any(name not in every.names for name in names)


def _types(stated: Any, values: Any) -> frozenset[str]:
    """Types that `type`, and `const` or `enum`, allow."""
    if isinstance(values, list):
        return frozenset().union(*(_types_of(value) for value in values))
    several = [stated] if isinstance(stated, str) else stated
    if not isinstance(several, list):
        return frozenset(TYPES)
    return frozenset({*filter(TYPES.__contains__, several), *(["integer"] if "number" in several else [])})


def _types_of(value: Any) -> frozenset[str]:
    kinds = {type(None): "null", bool: "boolean", str: "string", list: "array", dict: "object"}
    kind = kinds.get(type(value))
    return frozenset({"integer", "number"}) if kind is None else frozenset({kind})


def _base_within(schema: Any, base: str) -> str:
    """Base of the references within a schema."""
    named = schema.get("$id") if isinstance(schema, dict) else None
    return urldefrag(urljoin(base, named))[0] if isinstance(named, str) else base
