"""Calls of functions: how a reply is asked to make one, and how calls are read out of the text of a reply.

Models write calls as their chat template taught them: JSON objects between <tool_call> tags (Hermes, Qwen), or a reply
that is nothing but JSON (Llama 3, Mistral). Both are read; which one is asked for, the template says.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MARKS = ("<|python_tag|>", "[TOOL_CALLS]")  # what may stand before a reply that is nothing but calls
JSON_FORM = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}


class Call(NamedTuple):
    """One call: the function's name, and its arguments as JSON text."""

    name: str
    arguments: str

    def to_json(self) -> dict[str, Any]:
        """As a message holds it, with an id to answer to."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def read_calls(text: str, names: Collection[str]) -> tuple[str, list[Call]]:
    """What a reply says besides, and the calls in it; what is no call of a known function stays text."""
    content, tagged, rest = text.partition(OPEN)
    pieces = [piece.partition(CLOSE)[0] for piece in rest.split(OPEN)] if tagged else [_unmarked(text)]
    calls = [_calls(piece, names) for piece in pieces]
    if any(not found for found in calls):
        return text, []
    return (content if tagged else "").rstrip(), [call for found in calls for call in found]


def sure(text: str) -> int:
    """How many characters of a reply that goes on are content whatever follows."""
    begin = text.lstrip()
    if not begin or begin[0] in "{[" or any(mark.startswith(begin[: len(mark)]) for mark in MARKS):
        return 0
    end = text.find(OPEN)
    if end < 0:
        end = len(text) - max(n for n in range(len(OPEN)) if text.endswith(OPEN[:n]))
    return len(text[:end].rstrip())


class Reader:
    """Reads calls out of replies that come in pieces; text that may turn out to be a call waits for the end.

    Args:
        names: functions that may be called; without any, all is text.
        several: whether more than the first call counts.
    """

    def __init__(self, names: Collection[str], several: bool = True) -> None:
        self._names, self._several = names, several
        self._texts: dict[int, str] = {}  # of each choice, so far
        self._shown: dict[int, int] = {}  # how much of it is out

    def feed(self, place: int, piece: str, done: bool) -> tuple[str, list[Call]]:
        """Content that a piece of choice `place` adds, and at its end the calls."""
        if not self._names:
            return piece, []
        text = self._texts[place] = self._texts.get(place, "") + piece
        calls: list[Call] = []
        if done:
            text, calls = self.read(text)
        before = self._shown.get(place, 0)
        shown = self._shown[place] = max(before, len(text) if done else sure(text))
        return text[before:shown], calls

    def read(self, text: str) -> tuple[str, list[Call]]:
        """Content and calls of a whole reply."""
        if not self._names:
            return text, []
        content, calls = read_calls(text, self._names)
        return content, calls if self._several else calls[:1]


def _unmarked(text: str) -> str:
    text = text.strip()
    for mark in MARKS:
        text = text.removeprefix(mark).lstrip()
    return text


def _calls(text: str, names: Collection[str]) -> list[Call]:
    """The calls in a JSON text: an object, a list, or several with semicolons between; none if any is no call."""
    decoder, found, at = json.JSONDecoder(), [], 0
    text = text.strip()
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return []
        found += value if isinstance(value, list) else [value]
        while at < len(text) and text[at] in "; \n":
            at += 1
    calls = [_call(value, names) for value in found]
    return [call for call in calls if call is not None] if None not in calls else []


def _call(value: Any, names: Collection[str]) -> Call | None:
    if not isinstance(value, Mapping) or value.get("name") not in names:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return Call(value["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))


def call_grammar(functions: Sequence[Mapping[str, Any]], tagged: bool) -> str:
    """A grammar, in Lark's notation, of one call of one of these functions.

    Args:
        functions: each with name and parameters, a JSON schema.
        tagged: between <tool_call> tags, otherwise as Llama 3 writes it.
    """
    key = "arguments" if tagged else "parameters"
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": each["name"]}, key: each.get("parameters") or {"type": "object"}},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for each in functions
    ]
    schema = json.dumps({"x-guidance": JSON_FORM, "anyOf": calls})
    start = f'"{OPEN}\\n" call "\\n{CLOSE}"' if tagged else "call"
    return f"start: {start}\ncall: %json {schema}"
