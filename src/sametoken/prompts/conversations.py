"""Conversations from JSON Lines files or JSON arrays, from the formats of published data sets to one type of record.

Keys are `conversations` or `messages`, `{from, value}` or `{role, content}`; sentinels and empty lines are skipped.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from sametoken.checkpoint.paths import user_path
from sametoken.errors import DataError
from sametoken.prompts.specification import SUFFIXES, mixed, read_specification

CONVERSATION_KEYS = ("conversations", "messages")
ID_KEYS = ("conversation_id", "id", "uuid")
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "tool": "tool",
}
BOM = b"\xef\xbb\xbf"
STDIN = "-"
SHOWN = 80  # characters of an invalid line in a message


class Record(NamedTuple):
    """Conversation of a file.

    Attributes:
        id: `conversation_id`, `id` or `uuid` as a string, otherwise the line number from 1. Files may repeat ids.
        messages: one or more, oldest first, with a role (system, user, assistant or tool) and a text as content.
        truncated: true if the last answer was cut by length.
        rest: other keys of the line.
    """

    id: str
    messages: list[dict[str, Any]]
    truncated: bool
    rest: dict[str, Any]

    def prompt(self) -> list[dict[str, Any]]:
        """Messages without the answers at the end; an empty list if no other message is there."""
        asked = list(self.messages)
        while asked and asked[-1]["role"] == "assistant":
            asked.pop()
        return asked


class DataRow(NamedTuple):
    """JSON object of a file, with its place for messages and its number from 1."""

    where: str
    number: int
    entry: dict[str, Any]


def read_records(file: str | Path) -> Iterator[Record]:
    """Yield the conversations of a .jsonl or .json file in order, with one line (or a whole array) in memory at a time.

    Raises:
        DataError: the file cannot be read, or a line is no conversation; the message has file and line.
    """
    for row in read_rows(file):
        if (record := parse_record(row)) is not None:
            yield record


def read_rows(file: str | Path) -> Iterator[DataRow]:
    """Yield the objects of a JSON Lines file or a JSON array, without `{"finished": true}`; or of a specification.

    Raises:
        DataError: the file cannot be read, is not UTF-8, or a line is no JSON object.
    """
    path = user_path(file)
    try:
        if path.suffix in SUFFIXES:
            entries = mixed(read_specification(path), lambda part: (row.entry for row in read_rows(part)))
            for number, entry in enumerate(entries, 1):
                yield DataRow(f"{path}, conversation {number} ({entry['source']})", number, entry)
            return
        with path.open("rb") as stream:
            yield from _parse_rows(path, stream)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}; expected a readable file of conversations") from error


def read_stdin() -> Iterator[DataRow]:
    """Yield the objects of the standard input, as `read_rows`."""
    return _parse_rows(STDIN, io.BytesIO(sys.stdin.buffer.read()))


def has_conversation(row: DataRow) -> bool:
    """Return True if the row is one for `parse_record`: it has messages, or nothing but an id."""
    stated = {key for key, value in row.entry.items() if value is not None}
    return bool(stated & set(CONVERSATION_KEYS)) or stated <= set(ID_KEYS)


def _parse_rows(path: str | Path, stream: BinaryIO) -> Iterator[DataRow]:
    head = stream.read(4096).removeprefix(BOM).lstrip()
    stream.seek(0)
    parse = _parse_array if head.startswith(b"[") else _parse_lines
    for row in parse(path, stream):
        if row.entry != {"finished": True}:
            yield row


def _parse_lines(path: str | Path, lines: Iterable[bytes]) -> Iterator[DataRow]:
    for number, line in enumerate(lines, 1):
        if line.removeprefix(BOM).strip():
            where = f"{path}, line {number}"
            yield DataRow(where, number, _object(_parse(line, where), where))


def _parse_array(path: str | Path, lines: Iterable[bytes]) -> Iterator[DataRow]:
    for number, entry in enumerate(_parse(b"".join(lines), str(path)), 1):
        where = f"{path}, entry {number}"
        yield DataRow(where, number, _object(entry, where))


def _parse(content: bytes, where: str) -> Any:
    try:
        return json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: byte {error.start} is not UTF-8; save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON ({error}); expected one object per line, or one array") from error


def _object(entry: object, where: str) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise DataError(f"{where}: got {str(entry)[:SHOWN]}, expected an object with prompt, messages or conversations")
    return entry


def files_of(file: str | Path) -> list[Path]:
    """The file, and the files that it takes conversations from if it is a specification."""
    path = user_path(file)
    parts = read_specification(path) if path.suffix in SUFFIXES and path.is_file() else []
    return [path, *(split.file for mix in parts for split in mix.splits)]


def row_id(row: DataRow) -> str:
    """Id of a row, by default its number.

    Raises:
        DataError: the id is neither text nor integer, or is empty.
    """
    key = next((key for key in ID_KEYS if row.entry.get(key) is not None), None)
    stated = row.number if key is None else row.entry[key]
    if isinstance(stated, bool) or not isinstance(stated, str | int) or stated == "":
        raise DataError(f"{row.where}: {key} is {str(stated)[:SHOWN]!r}, expected a text or an integer")
    return str(stated)


def parse_record(row: DataRow) -> Record | None:
    """Conversation of a row; None for a row without one (an id alone, or a list without messages).

    A text under `system` becomes the first system turn unless the conversation has one.

    Raises:
        DataError: the row is no conversation.
    """
    entry = {key: value for key, value in row.entry.items() if value is not None}
    found = [key for key in CONVERSATION_KEYS if key in entry]
    if not found and entry.keys() <= set(ID_KEYS):
        return None
    if len(found) != 1:
        raise DataError(f"{row.where}: got keys {', '.join(entry)[:SHOWN]}, expected either conversations or messages")
    turns, truncated = entry.pop(found[0]), entry.pop("truncated", False)
    if not isinstance(turns, list):
        raise DataError(f"{row.where}: {found[0]} is {str(turns)[:SHOWN]}, expected a list of messages")
    if not isinstance(truncated, bool):
        raise DataError(f"{row.where}: truncated is {str(truncated)[:SHOWN]!r}, expected true or false")
    if not turns:
        return None
    messages = [parse_message(turn, f"{row.where}, message {place}") for place, turn in enumerate(turns, 1)]
    if messages[0]["role"] != "system" and isinstance(entry.get("system"), str):
        system = writable_text(entry.pop("system"), f"{row.where}: system")
        messages = [{"role": "system", "content": system}, *messages] if system else messages
    stated = next((key for key in ID_KEYS if key in entry), None)
    return Record(row_id(row), messages, truncated, {key: value for key, value in entry.items() if key != stated})


def parse_message(turn: object, where: str) -> dict[str, Any]:
    """Message with role and content; other keys of a `{role, content}` message (tool calls, a name) are kept.

    Raises:
        DataError: the role is unknown, or the content is no text.
    """
    if not isinstance(turn, Mapping):
        raise DataError(f"{where}: got {str(turn)[:SHOWN]}, expected an object with role and content")
    stated = turn.get("role", turn.get("from"))
    role = ROLES.get(stated.lower()) if isinstance(stated, str) else None
    if role is None:
        raise DataError(f"{where}: the role is {str(stated)[:SHOWN]!r}, expected one of {', '.join(ROLES)}")
    content = turn.get("content", turn.get("value"))
    if isinstance(content, list):
        content = _joined(content, where)
    elif content is None and "tool_calls" in turn:
        content = ""
    others = {key: value for key, value in turn.items() if key not in ("role", "content")} if "role" in turn else {}
    return {"role": role, "content": writable_text(content, f"{where}: content"), **others}


def _joined(parts: list[Any], where: str) -> str:
    """Text of a content in parts, as sent by some clients."""
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise DataError(f"{where}: the content has parts that are not text; expected text only")
    return "".join(texts)  # type: ignore[arg-type]


def writable_text(text: object, name: str) -> str:
    """Return the value if it is a text that UTF-8 can encode.

    Raises:
        DataError: it is not; the message uses `name`.
    """
    if not isinstance(text, str):
        raise DataError(f"{name} is {str(text)[:SHOWN]}, expected a text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{name} has half of a surrogate pair at character {error.start}; remove it") from error
    return text
