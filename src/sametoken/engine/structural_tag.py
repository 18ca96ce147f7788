"""Translation of structural tags of vLLM and xgrammar to grammars in Lark's notation.

A structural tag is free text in which marks begin parts of a required form. Free text ends at the first mark that
follows it in the grammar (a lazy rule of llguidance). Free text before another part therefore needs a mark after it; a
tag without one is refused. A special token within a mark is that token, which is never a part of free text.

This module imports neither torch nor pydantic; it is used by `engine.grammar_trial`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sametoken.engine.closed_objects import closed

# JSON in the format of Python's json.dumps: with fixed white space, more tokens are forced.
JSON_FORM = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
ANY = "/(?s:.*)/"
SLASH = re.compile(r"(\\.)|/", re.DOTALL)
NAMED = re.compile(r"<[^<>\s]+>")  # special tokens that Lark can name

Marks = tuple[str, ...]
Test = tuple[str, Callable[[Any], bool]]


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) and each for each in value)


def _several(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _formats(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict) for each in value)


TEXT: Test = "a text", lambda value: isinstance(value, str)
TEXTS: Test = "a list of texts that are not empty", _texts
MARKS: Test = "at least one text, none of them empty", lambda value: _texts(value) and bool(value)
END: Test = (
    "a text, or a list of texts that are not empty",
    lambda value: _texts(_several(value)) or value in ("", [""]),
)
FLAG: Test = "true or false", lambda value: isinstance(value, bool)
COUNT: Test = "an integer >= 0", lambda value: type(value) is int and value >= 0
SOME: Test = "an integer >= 1", lambda value: type(value) is int and value >= 1
LIMIT: Test = "an integer >= -1", lambda value: type(value) is int and value >= -1
FORMAT: Test = "an object with a type", lambda value: isinstance(value, dict)
FORMATS: Test = "a list of objects, at least one", _formats
SCHEMA: Test = "a JSON schema", lambda value: isinstance(value, dict | bool)
RULES: Test = (
    "a list of [text, object], at least one",
    lambda value: bool(value) and isinstance(value, list) and all(
        isinstance(each, list) and len(each) == 2 and isinstance(each[0], str) and each[0] and isinstance(each[1], dict)
        for each in value
    ),
)  # fmt: skip

REPEATED: dict[str, Test] = {"content": FORMAT}
TAGS: dict[str, Test] = {"tags": FORMATS, "at_least_one?": FLAG, "stop_after_first?": FLAG}
# Fields of each type; those with a question mark are optional.
KNOWN: dict[str, dict[str, Test]] = {
    "const_string": {"value": TEXT},
    "json_schema": {
        "json_schema": SCHEMA,
        "style?": ('"json"', lambda value: value == "json"),
        "any_order?": ("false", lambda value: value is False),
        "max_whitespace_cnt?": SOME,
        "excludes?": ("an empty list", lambda value: value == []),
    },
    "regex": {"pattern": TEXT},
    "any_text": {"excludes?": TEXTS, "max_chars?": COUNT},
    "sequence": {"elements": FORMATS},
    "or": {"elements": FORMATS},
    "tag": {"begin": TEXT, "content": FORMAT, "end": END},
    "triggered_tags": {"triggers": MARKS, "excludes?": TEXTS, **TAGS},
    "dispatch": {"rules": RULES, "loop?": FLAG, "excludes?": TEXTS},
    "tags_with_separator": {"separator": TEXT, **TAGS},
    "optional": REPEATED,
    "plus": REPEATED,
    "star": REPEATED,
    "repeat": {"min": COUNT, "max": LIMIT, **REPEATED},
}
LEGACY: dict[str, Test] = {"structures": FORMATS, "triggers": MARKS}
STRUCTURE: dict[str, Test] = {"begin": TEXT, "schema?": SCHEMA, "end": TEXT}


def quoted(text: str) -> str:
    """Literal of Lark for a text."""
    return json.dumps(text, ensure_ascii=False)


def json_of(schema: Mapping[str, Any] | bool) -> str:
    """Rule of Lark for a JSON schema."""
    spelled = {"not": {}} if schema is False else {} if schema is True else closed(schema)
    return f"%json {json.dumps({**spelled, 'x-guidance': JSON_FORM})}"


def lark_of(asked: Mapping[str, Any], special: Iterable[str] = ()) -> str:
    """Grammar of a structural tag.

    Args:
        asked: object with `format`, or with `structures` and `triggers` as in older releases of vLLM.
        special: texts of the model's special tokens.

    Raises:
        ValueError: the object is no structural tag, or text in it has no end.
    """
    given = {name: value for name, value in asked.items() if value is not None}
    if given.pop("type", "structural_tag") != "structural_tag":
        raise ValueError(f"structural_tag.type: got {_shown(asked['type'])}, expected structural_tag")
    if "structures" in given or "triggers" in given:
        _check(given, LEGACY, "structural_tag")
        given = {"format": _triggered(given)}
    _check(given, {"format": FORMAT}, "structural_tag")
    writer = _Writer(special)
    try:
        start = writer.made(given["format"], "structural_tag.format", ())
    except RecursionError:
        raise ValueError("structural_tag.format: it is nested too deep") from None
    return "\n".join([f"start: {start}", *writer.rules])


def _triggered(given: Mapping[str, Any]) -> dict[str, Any]:
    """Format for structures and triggers."""
    tags = []
    for place, each in enumerate(given["structures"]):
        fields = _check(each, STRUCTURE, f"structural_tag.structures[{place}]")
        content = {"type": "json_schema", "json_schema": fields.get("schema", True)}
        tags.append({"type": "tag", "begin": fields["begin"], "content": content, "end": fields["end"]})
    return {"type": "triggered_tags", "triggers": given["triggers"], "tags": tags}


def _check(given: Mapping[str, Any], fields: Mapping[str, Test], place: str) -> dict[str, Any]:
    """Stated fields of an object, after a check; null means an absent field."""
    values = {name: value for name, value in given.items() if value is not None and name != "type"}
    names = [name.removesuffix("?") for name in fields]
    if unknown := sorted(values.keys() - set(names)):
        raise ValueError(f"{place}: got {_shown(unknown[0])}, expected no fields but {', '.join(names)}")
    for name, (words, test) in fields.items():
        own = name.removesuffix("?")
        if own in values and not test(values[own]):
            raise ValueError(f"{place}.{own}: got {_shown(values[own])}, expected {words}")
        if own == name and own not in values:
            raise ValueError(f"{place}.{own}: got nothing, expected {words}")
    return values


def _tag_of(given: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Checked member of `tags`, whose type is optional."""
    if given.get("type", "tag") != "tag":
        raise ValueError(f"{place}.type: got {_shown(given['type'])}, expected tag")
    return {**_check(given, KNOWN["tag"], place), "type": "tag"}


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _either(ways: Iterable[str]) -> str:
    listed = [*ways]
    return f"({' | '.join(listed)})" if listed else ""


def _is_open(given: Mapping[str, Any]) -> bool:
    """True if a format ends with free text."""
    match given.get("type"):
        case "any_text" | "dispatch":
            return True
        case "triggered_tags":
            return not (given.get("at_least_one") and given.get("stop_after_first"))
        case "or":
            return any(map(_is_open, given["elements"]))
        case "sequence":
            return _is_open(given["elements"][-1])
        case "optional":
            return _is_open(given["content"])
    return False


class _Writer:
    """Writer of the rules of a grammar.

    In every method, `place` is the path of the format for errors. One of `marks` follows the format, and is part of the
    result; without `marks`, the format is last, or the part after it needs no mark.
    """

    def __init__(self, special: Iterable[str]) -> None:
        self.rules: list[str] = []
        named = sorted(filter(NAMED.fullmatch, special), key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, named)) or '(?!)'})")

    def _rule(self, body: str, prefix: str = "r", attribute: str = "") -> str:
        name = f"{prefix}{len(self.rules)}"
        self.rules.append(f"{name}{attribute}: {body}")
        return name

    def made(self, given: Any, place: str, marks: Marks) -> str:
        """Expression of a format."""
        kind = given.get("type")
        if not isinstance(kind, str) or kind not in KNOWN:
            raise ValueError(f"{place}.type: got {_shown(kind)}, expected one of {', '.join(KNOWN)}")
        fields = _check(given, KNOWN[kind], place)
        made: str = getattr(self, f"_{kind}")(fields, place, marks)
        return made

    def _closed(self, given: Mapping[str, Any], place: str) -> str:
        """Expression of a format that is followed by a part other than a mark."""
        made = self.made(given, place, ())
        if _is_open(given):
            raise ValueError(f"{place}: got text without an end, expected a tag with an end, since more may follow")
        return made

    def _mark(self, text: str) -> str:
        """Expression of a text, with its special tokens."""
        parts = self._special.split(text)  # those at odd places are special tokens
        return " ".join(part if at % 2 else quoted(part) for at, part in enumerate(parts))

    def _one_of(self, marks: Marks) -> str:
        """Expression of one of `marks`; empty without marks."""
        return _either(map(self._mark, marks))

    def _until(self, text: str, marks: Marks) -> str:
        """Expression of a terminal that ends at the first mark."""
        plain, ways = [], []
        for end in marks:
            head, *token = self._special.split(end, maxsplit=1)
            if token:
                ways.append(f"{self._rule(f'{text} {quoted(head)}', 'T')} {token[0]} {self._mark(token[1])}")
            else:
                plain.append(quoted(end))
        if plain:
            ways.append(self._rule(f"{text} {_either(plain)}", attribute="[lazy]"))
        return _either(ways) or text

    def _free(self, fields: Mapping[str, Any]) -> str:
        """Terminal of free text."""
        most, excludes = fields.get("max_chars"), fields.get("excludes")
        text = ANY if most is None else f"/(?s:.{{0,{most}}})/"
        return self._rule(f"{text} & ~({ANY} {_either(map(quoted, excludes))} {ANY})" if excludes else text, "T")

    def _const_string(self, fields: Mapping[str, Any], place: str, marks: Marks) -> str:
        return f"{self._mark(fields['value'])} {self._one_of(marks)}"

    def _json_schema(self, fields: Mapping[str, Any], place: str, marks: Marks) -> str:
        return f"{self._rule(json_of(fields['json_schema']))} {self._one_of(marks)}"

    def _regex(self, fields: Mapping[str, Any], place: str, marks: Marks) -> str:
        pattern = SLASH.sub(lambda found: found[1] or r"\/", fields["pattern"]).replace("\n", r"\n")
        return self._until(self._rule(f"/{pattern or '(?:)'}/", "T"), marks)

    def _any_text(self, fields: Mapping[str, Any], place: str, marks: Marks) -> str:
        return self._until(self._free(fields), marks)

    def _sequence(self, fields: Mapping[str, Any], place: str, marks: Marks) -> str:
        elements, parts = list(fields["elements"]), []
        for at in range(len(elements) - 1):
            here, each, after = f"{place}.elements[{at}]", *elements[at : at + 2]
            head = {"const_string": "value", "tag": "begin"}.get(str(after.get("type")), "")
            mark = after.get(head)
            if isinstance(mark, str) and mark:
                parts.append(self.made(each, here, (mark,)))
                elements[at + 1] = {**after, head: ""}
            else:
                parts.append(self._closed(each, here))
        return " ".join([*parts, self.made(elements[-1], f"{place}.elements[{len(parts)}]", marks)])

    def _or(self, fields: Mapping[str, Any], place: str, marks: Marks) -> str:
        elements = fields["elements"]
        return f"({' | '.join(self.made(each, f'{place}.elements[{at}]', marks) for at, each in enumerate(elements))})"

    def _tag(self, fields: Mapping[str, Any], place: str, marks: Marks) -> str:
        own = tuple(_several(fields["end"]))
        begin, content = self._mark(fields["begin"]), f"{place}.content"
        made = self._closed(fields["content"], content) if own == ("",) else self.made(fields["content"], content, own)
        return f"{begin} {made} {self._one_of(marks)}"

    def _triggered_tags(self, fields: Mapping[str, Any], place: str, marks: Marks) -> str:
        parts: dict[str, list[tuple[Any, str]]] = {trigger: [] for trigger in fields["triggers"]}
        for at, tag in enumerate(fields["tags"]):
            here = f"{place}.tags[{at}]"
            own = _tag_of(tag, here)
            begin = own["begin"]
            fitting = [trigger for trigger in parts if begin.startswith(trigger)]
            if len(fitting) != 1:
                expected = f"one that starts with exactly one of the triggers {_shown(list(parts))}"
                raise ValueError(f"{here}.begin: got {_shown(begin)}, expected {expected}")
            parts[fitting[0]].append(({**own, "begin": begin.removeprefix(fitting[0])}, here))
        if idle := [trigger for trigger, tags in parts.items() if not tags]:
            raise ValueError(f"{place}.triggers: got {_shown(idle[0])}, expected the start of a tag's begin")
        more, needed = not fields.get("stop_after_first"), bool(fields.get("at_least_one"))
        return self._dispatched(self._free(fields), parts, marks, more=more, needed=needed)

    def _dispatch(self, fields: Mapping[str, Any], place: str, marks: Marks) -> str:
        parts: dict[str, list[tuple[Any, str]]] = {}
        for at, (trigger, content) in enumerate(fields["rules"]):
            parts.setdefault(trigger, []).append((content, f"{place}.rules[{at}][1]"))
        return self._dispatched(self._free(fields), parts, marks, more=fields.get("loop", True), needed=False)

    def _dispatched(
        self, text: str, parts: Mapping[str, Sequence[tuple[Any, str]]], marks: Marks, *, more: bool, needed: bool
    ) -> str:
        """Expression of free text in which triggers begin formats.

        Args:
            text: terminal of the free text.
            parts: formats that may follow each trigger, with their places, by trigger.
            marks: see the class.
            more: true if text and further triggers may follow.
            needed: true if the text begins with a trigger.
        """
        firsts, others = [], []
        for trigger, formats in parts.items():
            made = [self._closed(*each) if more else self.made(*each, marks) for each in formats]
            rest = self._rule(" | ".join(made))
            firsts.append(f"{self._mark(trigger)} {rest}")
            others.append(f"{self._until(text, (trigger,))} {rest}")
        first, other = f"({' | '.join(firsts)})", f"({' | '.join(others)})"
        if more:
            return f"{first if needed else ''} {other}* {self._until(text, marks)}"
        return first if needed else f"({other} | {self._until(text, marks)})"

    def _tags_with_separator(self, fields: Mapping[str, Any], place: str, marks: Marks) -> str:
        places = [f"{place}.tags[{at}]" for at in range(len(fields["tags"]))]
        tags = [self._closed(_tag_of(*each), each[1]) for each in zip(fields["tags"], places, strict=True)]
        tag = self._rule(" | ".join(tags))
        several = tag if fields.get("stop_after_first") else f"{tag} ({self._mark(fields['separator'])} {tag})*"
        return f"({several}){'' if fields.get('at_least_one') else '?'} {self._one_of(marks)}"

    def _optional(self, fields: Mapping[str, Any], place: str, marks: Marks) -> str:
        made = self.made(fields["content"], f"{place}.content", marks)
        return f"({made} | {self._one_of(marks)})" if marks else f"({made})?"

    def _plus(self, fields: Mapping[str, Any], place: str, marks: Marks) -> str:
        return f"({self._closed(fields['content'], f'{place}.content')})+ {self._one_of(marks)}"

    def _star(self, fields: Mapping[str, Any], place: str, marks: Marks) -> str:
        return f"({self._closed(fields['content'], f'{place}.content')})* {self._one_of(marks)}"

    def _repeat(self, fields: Mapping[str, Any], place: str, marks: Marks) -> str:
        least, most = fields["min"], fields["max"]
        if -1 < most < least:
            raise ValueError(f"{place}.max: got {most}, expected at least min, which is {least}, or -1")
        made = self._closed(fields["content"], f"{place}.content")
        return f"({made}){{{least},{'' if most < 0 else most}}} {self._one_of(marks)}"
