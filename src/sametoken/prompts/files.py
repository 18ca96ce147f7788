"""Prompts from files of conversations, of texts, and of published benchmarks, recognised line by line.

All commands read prompts with this module, so they accept the same files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from sametoken.errors import ConfigError, DataError, RequestError, unknown_name
from sametoken.prompts.conversations import (
    CONVERSATION_KEYS,
    STDIN,
    DataRow,
    has_conversation,
    parse_record,
    read_rows,
    read_stdin,
)
from sametoken.prompts.sources import Conversation, Source, as_turn, nonempty_text

KEYS = ("prompt", "category")


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


def read_items(file: str, option: str) -> tuple[list[str], list[PromptItem]]:
    """Read the prompts of a file of JSON lines, or a JSON array; "-" is standard input.

    Args:
        option: option that named the file, for messages.

    Returns:
        The names of the lines' formats, in the order of the first occurrence, and the prompts.

    Raises:
        ConfigError: the file is empty.
        DataError: the file cannot be read, or a line is not JSON or no conversation; the message has its number.
        RequestError: a line is not a prompt; the message has its number.
    """
    try:
        found = parse_items(read_stdin() if file == STDIN else read_rows(file))
    except DataError as error:
        raise DataError(f"{option} {error}") from error
    if not found[1]:
        raise ConfigError(f"{option} {file} is empty; expected one JSON object per line with prompt or messages")
    return found


def parse_items(rows: Iterable[DataRow]) -> tuple[list[str], list[PromptItem]]:
    """Parse rows; return the names of their formats and the prompts.

    Raises:
        DataError, RequestError: as `read_items`.
    """
    labels, items = [], []
    for row in rows:
        label, item = parse_item(row)
        if item is None:
            raise RequestError(f"{row.where}: no message of a user, expected at least one")
        labels.append(label)
        items.append(item)
    return list(dict.fromkeys(labels)), items


def parse_item(row: DataRow) -> tuple[str, PromptItem | None]:
    """Name of a row's format, and its prompt: of a conversation the messages before its last answer, None if none.

    Raises:
        DataError, RequestError: as `read_items`.
    """
    # Columns without a value are null in exported tables.
    entry, where = {key: value for key, value in row.entry.items() if value is not None}, row.where
    if has_conversation(row):
        record = parse_record(row)
        asked = [] if record is None else record.prompt()
        return "conversations", PromptItem(_category(entry, where), Conversation(asked)) if asked else None
    for label, (keys, read) in FORMS.items():
        if set(keys) <= entry.keys():
            return label, read(entry, where)
    known = "; ".join(f"{label}: {', '.join(keys)}" for label, (keys, _) in FORMS.items())
    raise RequestError(
        f"{where}: unknown format with the keys {', '.join(sorted(entry)) or '(none)'}; known formats and the keys "
        f"they need: conversations: {' or '.join(CONVERSATION_KEYS)}; {known}"
    )


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
    if unknown := sorted(entry.keys() - {*KEYS, "source"}):
        raise RequestError(f"{where}: {unknown_name('key', unknown[0], KEYS)}")
    return PromptItem(_category(entry, where), nonempty_text(entry["prompt"], f"{where}: prompt"))


def _category(entry: Mapping[str, Any], where: str) -> str:
    return nonempty_text(entry.get("category", "all"), f"{where}: category")


Reader = Callable[[dict[str, Any], str], PromptItem]
# The first format whose keys are all present applies, so narrower ones come first.
FORMS: Mapping[str, tuple[tuple[str, ...], Reader]] = {
    "spec-bench": (("turns",), _turns),  # MT-bench too
    "humaneval": (("task_id", "prompt", "entry_point"), _human_eval),
    "gsm8k": (("question", "answer"), _gsm8k),
    "prompts": (("prompt",), _prompt),
}
