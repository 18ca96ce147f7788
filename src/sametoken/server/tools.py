"""Tool calls: the grammar of a reply that must make some, and a state machine that reads them from streamed text.

Models write calls in the form of their chat template: JSON objects between <tool_call> tags (Hermes, Qwen), or a reply
of JSON alone (Llama 3, Mistral), which some put into a fence of Markdown, also after text (Qwen2.5-Coder). The reader
accepts all forms; the grammar has the form of the chat template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sametoken.server.reasoning import ARGUMENTS, CALL, CONTENT, Piece, begun_mark

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FENCES = ("```json", "```tool_call", "```")  # fences around a reply of calls alone; the longer ones first
MARKS = ("<|python_tag|>", "[TOOL_CALLS]", *FENCES)  # optional beginnings of such a reply
INNER = re.compile(f"{OPEN}|```(?:json|tool_call)")  # beginnings of a call within a text
INNER_MARKS = (OPEN, *FENCES[:2])
# The beginning of a call up to its arguments, an object or a list; the arguments are streamed.
HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=[{\[])')
NAME = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")')
NAMED = '{"name":"'  # beginning of a call, without spaces
BETWEEN = " \t\r\n;,[]"  # characters between objects
START, TEXT, NEXT, OBJECT, VALUE, TAIL = range(6)


class CallReader:
    """Reader of one reply, which may come in pieces; its output does not depend on the pieces.

    Text that may be the beginning of a call is kept back; a text that is no call of a known function remains text.

    Args:
        names: names of the functions that may be called; without names the whole reply is text.
        several: True if a reply may have several calls; otherwise only the first one counts.
    """

    def __init__(self, names: Collection[str], several: bool = True) -> None:
        self._names, self._several = names, several
        self._state, self._calls = (START if names else TEXT), 0
        self._rest = ""  # text that is not processed yet
        self._raw = ""  # processed text that may belong to a call, and is content if there is no call
        self._space = ""  # space after text, which is dropped before a call
        self._fenced = False
        self._inner = False  # True in a fence within a text
        self._scan = _Scan()
        self._scanned = 0

    def feed(self, text: str, done: bool = False) -> list[Piece]:
        """Pieces that a text adds; `done` is True with the last text."""
        if not self._names:
            return [Piece(CONTENT, text)] if text else []
        self._rest += text
        pieces: list[Piece] = []
        steps = (self._start, self._text, self._next, self._object, self._value, self._tail)
        while steps[self._state](pieces, done):
            pass
        if done and not self._calls:
            pieces.append(Piece(CONTENT, self._space))
        return [piece for piece in pieces if piece.text or piece.kind == CALL]

    # Each step processes a part of the rest, and returns True if another step may be possible.

    def _start(self, pieces: list[Piece], done: bool) -> bool:
        """Step at the beginning of the reply, which may consist of calls alone."""
        text = self._rest.lstrip()
        mark = _begun(MARKS, text, done)
        if mark == "":
            return False
        if mark or text[:1] in ("{", "["):
            mark = mark or ""
            self._fenced = mark in FENCES
            self._pass(len(self._rest) - len(text) + len(mark))
            self._state = NEXT
        else:
            self._state = TEXT
        return True

    def _text(self, pieces: list[Piece], done: bool) -> bool:
        """Step in text, up to the next tag, or to a fence at the beginning of a line."""
        marks = (found for found in INNER.finditer(self._rest) if found[0] == OPEN or self._begins_line(found.start()))
        mark = next(marks, None)
        end = mark.start() if mark else len(self._rest) - (0 if done else begun_mark(self._rest, INNER_MARKS))
        text = self._space + self._rest[:end]
        shown = text.rstrip()
        self._space = text[len(shown) :]
        pieces.append(Piece(CONTENT, shown))
        self._rest = self._rest[end:]
        if mark is None:
            return False
        self._fenced = self._inner = mark[0] != OPEN
        self._pass(len(mark[0]))
        self._state = NEXT
        return True

    def _begins_line(self, at: int) -> bool:
        return (self._rest[at - 1] if at else self._space[-1:]) == "\n"

    def _next(self, pieces: list[Piece], done: bool) -> bool:
        """Step between calls."""
        self._pass(len(self._rest) - len(self._rest.lstrip(BETWEEN)))
        if self._fenced and (fence := _begun(FENCES, self._rest, done)) is not None:
            if self._calls and not self._raw:  # the fence follows a call
                self._rest = self._rest[len(fence) :]
                self._state = TEXT if self._inner and fence == "```" else NEXT
            else:
                self._pass(len(fence))
            return bool(fence)
        if self._rest.startswith("{"):
            self._state, self._scan, self._scanned = OBJECT, _Scan(), 0
        elif self._rest.startswith(CLOSE) and not self._raw:
            self._rest, self._state = self._rest[len(CLOSE) :], TEXT
        elif (self._rest and not CLOSE.startswith(self._rest)) or (done and self._raw):
            self._give_up()
        else:
            return False
        return True

    def _object(self, pieces: list[Piece], done: bool) -> bool:
        """Step at the beginning of an object that may be a call."""
        if self._inner and not _may_call(self._rest, self._names):
            self._give_up()
            return True
        head = HEAD.match(self._rest)
        if head is not None:
            name = _loaded(head[1])
            if name not in self._names:
                self._give_up()
                return True
            self._call(name, pieces)
            self._rest = self._rest[head.end() :]
            self._state, self._scan = VALUE, _Scan()
            return True
        size = self._scan.feed(self._rest[self._scanned :])
        end = self._scanned + size
        self._scanned = len(self._rest)
        if size < 0:
            if done:
                self._give_up()
            return done
        made = _whole_call(_loaded(self._rest[:end]), self._names)
        if made is None:
            self._give_up()
        else:
            self._call(made[0], pieces)
            self._add_arguments(made[1], pieces)
            self._rest, self._state = self._rest[end:], NEXT
        return True

    def _value(self, pieces: list[Piece], done: bool) -> bool:
        """Step within the arguments."""
        end = self._scan.feed(self._rest)
        self._add_arguments(self._rest if end < 0 else self._rest[:end], pieces)
        self._rest = "" if end < 0 else self._rest[end:]
        if end >= 0:
            self._state, self._scan = TAIL, _Scan(depth=1)
        return end >= 0

    def _tail(self, pieces: list[Piece], done: bool) -> bool:
        """Step from the end of the arguments to the end of the call."""
        end = self._scan.feed(self._rest)
        self._rest = "" if end < 0 else self._rest[end:]
        if end >= 0:
            self._state = NEXT
        return end >= 0

    def _pass(self, size: int) -> None:
        self._raw, self._rest = self._raw + self._rest[:size], self._rest[size:]
        if self._state == NEXT and self._calls and not self._raw.strip(BETWEEN):
            self._raw = ""  # between calls

    def _give_up(self) -> None:
        """Treat the text of a supposed call as content; its tags are not parsed again."""
        self._space += self._raw
        self._raw, self._state = "", TEXT

    def _call(self, name: str, pieces: list[Piece]) -> None:
        self._raw = self._space = ""
        self._calls += 1
        if self._several or self._calls == 1:
            pieces.append(Piece(CALL, name))

    def _add_arguments(self, text: str, pieces: list[Piece]) -> None:
        if self._several or self._calls == 1:
            pieces.append(Piece(ARGUMENTS, text))


class _Scan:
    """Finder of the end of a JSON object or list that comes in pieces."""

    SIGNS = re.compile(r'["\\{}\[\]]')

    def __init__(self, depth: int = 0) -> None:
        self._depth, self._quoted, self._escaped = depth, False, False

    def feed(self, text: str) -> int:
        """Number of characters up to the end of the JSON object or list, or -1 if the end is not in `text`."""
        at = 0
        while at < len(text):
            if self._escaped:
                self._escaped, at = False, at + 1
                continue
            found = self.SIGNS.search(text, at)
            if found is None:
                return -1
            sign, at = found[0], found.end()
            if sign == '"':
                self._quoted = not self._quoted
            elif self._quoted:
                self._escaped = sign == "\\"
            elif sign in "{[":
                self._depth += 1
            elif sign in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return at
        return -1


def _begun(marks: Sequence[str], text: str, done: bool) -> str | None:
    """Mark at the beginning of a text; "" if the text is the beginning of a mark, None if it is not."""
    if not done and any(mark.startswith(text) and mark != text for mark in marks):
        return ""
    return next((mark for mark in marks if text.startswith(mark)), None)


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _may_call(text: str, names: Collection[str]) -> bool:
    """Return True if an object with this beginning may be a call of a known function; the name must come first."""
    name = NAME.match(text)
    return _loaded(name[1]) in names if name else NAMED.startswith("".join(text[:200].split())[: len(NAMED)])


def _whole_call(value: Any, names: Collection[str]) -> tuple[str, str] | None:
    """Name and arguments of a call, or None if it is no call of a known function."""
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str) or value["name"] not in names:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return value["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def call_tag(functions: Sequence[Mapping[str, Any]], tagged: bool, several: bool = False) -> dict[str, Any]:
    """Structural tag of a reply that calls one of these functions.

    Args:
        functions: functions, each with name and parameters (a JSON schema).
        tagged: True for calls between <tool_call> tags, False for the form of Llama 3.
        several: True if the reply may have several calls.
    """
    key = "arguments" if tagged else "parameters"
    before, after = (f"{OPEN}\n", f"}}\n{CLOSE}") if tagged else ("", "}")
    tags = [
        {
            "begin": f'{before}{{"name": {json.dumps(each["name"], ensure_ascii=False)}, "{key}": ',
            "content": {"type": "json_schema", "json_schema": each.get("parameters") or {"type": "object"}},
            "end": after,
        }
        for each in functions
    ]
    separator = "\n" if tagged else "; "
    return {
        "format": {
            "type": "tags_with_separator", "tags": tags, "separator": separator, "at_least_one": True,
            "stop_after_first": not several,
        }
    }  # fmt: skip
