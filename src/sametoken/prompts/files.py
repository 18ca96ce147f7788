"""Prompts from JSON Lines files: our own format and those of published benchmarks, recognised line by line.

All commands read prompts with this module, so they accept the same files.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from sametoken.checkpoint.paths import user_path
from sametoken.errors import ConfigError, RequestError, unknown_name
from sametoken.prompts.sources import STDIN, Conversation, Source, as_turn, nonempty_text

KEYS = ("messages", "prompt", "category")
Entry = tuple[str, dict[str, Any]]  # place of the line, and the object


class PromptItem(NamedTuple):
    """One prompt.

    Attributes:
        category: category under which results are reported.
        source: prompt. A conversation of one turn is its text if the model has no chat template.
        later: user messages of the turns after the first.
    """

    category: str
    source: Source
    later: tuple[str, ...] = ()


def read_items(file: str, option: str) -> list[PromptItem]:
    """Read the prompts of a JSON Lines file; "-" is standard input.

    Args:
        option: option that named the file, for messages.

    Raises:
        ConfigError: the file cannot be read or is empty.
        RequestError: a line is not a prompt; the message has its number.
    """
    return parse_items(read_entries(file, option))[1]


def read_entries(file: str, option: str) -> list[Entry]:
    """Read the objects of a JSON Lines file, each with its place for messages; "-" is standard input.

    Raises:
        ConfigError: the file cannot be read or is empty.
        RequestError: a line is not a JSON object; the message has its number.
    """
    try:
        content = sys.stdin.read() if file == STDIN else user_path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {file}: {error.strerror}; expected a readable file of JSON lines") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{option} {file}: byte {error.start} is not UTF-8; save the file as UTF-8") from error
    # Not splitlines, which splits at U+2028, a valid character of JSON strings.
    lines = [(f"{file}, line {number}", line) for number, line in enumerate(content.split("\n"), 1) if line.strip()]
    if not lines:
        raise ConfigError(f"{option} {file} is empty; expected one JSON object per line with prompt or messages")
    return [(where, _parse_object(line, where)) for where, line in lines]


def parse_items(entries: Iterable[Entry]) -> tuple[list[str], list[PromptItem]]:
    """Parse entries; return the names of their formats, in the order of the first occurrence, and the prompts.

    Raises:
        RequestError: an entry has no known format, or one of its values is wrong; the message has its place.
    """
    labels, items = [], []
    for where, entry in entries:
        label, read = _reader_of(where, entry)
        labels.append(label)
        items.append(read(entry, where))
    return list(dict.fromkeys(labels)), items


def _reader_of(where: str, entry: Mapping[str, Any]) -> tuple[str, Reader]:
    for label, (keys, read) in FORMS.items():
        if set(keys) <= entry.keys():
            return label, read
    known = "; ".join(f"{label}: {', '.join(keys)}" for label, (keys, _) in FORMS.items())
    raise RequestError(
        f"{where}: unknown format with the keys {', '.join(sorted(entry)) or '(none)'}; known formats and the keys "
        f"they need: {known}"
    )


def _parse_object(line: str, where: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where} is not JSON ({error}); expected an object with prompt or messages") from error
    if not isinstance(entry, dict):
        raise RequestError(f"{where}: got {line.strip()[:80]}, expected an object with either prompt or messages")
    return entry


def _turns(entry: dict[str, Any], where: str) -> PromptItem:
    turns = entry["turns"]
    if not isinstance(turns, list) or not turns:
        raise RequestError(f"{where}: turns is {str(turns)[:80]!r}, expected a list of at least one text")
    texts = [nonempty_text(turn, f"{where}: turn {number}") for number, turn in enumerate(turns, 1)]
    return PromptItem(_category(entry, where), as_turn(texts[0]), tuple(texts[1:]))


def _human_eval(entry: dict[str, Any], where: str) -> PromptItem:
    return PromptItem("code", nonempty_text(entry["prompt"], f"{where}: prompt"))


def _gsm8k(entry: dict[str, Any], where: str) -> PromptItem:
    return PromptItem("math", as_turn(nonempty_text(entry["question"], f"{where}: question")))


def _prompt(entry: dict[str, Any], where: str) -> PromptItem:
    if "prompt" in entry and "messages" in entry:
        raise RequestError(f"{where}: got both, expected either prompt or messages")
    if unknown := sorted(entry.keys() - set(KEYS)):
        raise RequestError(f"{where}: {unknown_name('key', unknown[0], KEYS)}")
    if "prompt" in entry:
        return PromptItem(_category(entry, where), nonempty_text(entry["prompt"], f"{where}: prompt"))
    messages = entry["messages"]
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise RequestError(f"{where}: messages must be a list of at least one object with role and content")
    return PromptItem(_category(entry, where), Conversation(messages))


def _answered(entry: dict[str, Any], where: str) -> PromptItem:
    """Conversation as `sametoken synthesize` writes it, without its last answer."""
    turns = entry["conversations"]
    if not isinstance(turns, list) or not all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in turns):
        raise RequestError(f"{where}: conversations must be a list of objects with role and content")
    while turns and turns[-1]["role"] == "assistant":
        turns = turns[:-1]
    if not turns:
        raise RequestError(f"{where}: conversations has no turn of a user, expected at least one")
    return PromptItem(_category(entry, where), Conversation(turns))


def _category(entry: Mapping[str, Any], where: str) -> str:
    return nonempty_text(entry.get("category", "all"), f"{where}: category")


Reader = Callable[[dict[str, Any], str], PromptItem]
# The first format whose keys are all present applies, so narrower ones come first.
FORMS: Mapping[str, tuple[tuple[str, ...], Reader]] = {
    "spec-bench": (("turns",), _turns),  # MT-bench too
    "humaneval": (("task_id", "prompt", "entry_point"), _human_eval),
    "gsm8k": (("question", "answer"), _gsm8k),
    "prompts": (("prompt",), _prompt),
    "conversations": (("messages",), _prompt),
    "answered": (("conversations",), _answered),
}
