"""Separation of training data and held-out prompts: division of a file, and removal of conversations that overlap."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sametoken.data.self_prompts import plain_text
from sametoken.files import replacing
from sametoken.prompts.conversations import read_records, read_rows

RUN = 13  # successive tokens that two prompts may not share
FEWEST = 10  # conversations, of which one is held out


class HeldOutRuns:
    """Runs of `RUN` tokens in the users' turns of a file; a shorter turn is one run.

    Args:
        file: file of conversations.
        encode: tokenizer, from text to ids. Case and punctuation are left out before.

    Raises:
        DataError: the file cannot be read, or a line is no conversation.
    """

    def __init__(self, file: str | Path, encode: Callable[[str], Sequence[int]]) -> None:
        self._encode = encode
        self._runs = {run for record in read_records(file) for run in self._of(record.messages)}

    def shares(self, messages: Iterable[dict[str, Any]]) -> bool:
        """True if a user's turn has a run of the file."""
        return any(run in self._runs for run in self._of(messages))

    def _of(self, messages: Iterable[dict[str, Any]]) -> Iterator[tuple[int, ...]]:
        for message in messages:
            if message["role"] == "user":
                ids = tuple(self._encode(plain_text(message["content"])))
                for start in range(max(1, len(ids) - RUN + 1)):
                    yield ids[start : start + RUN]


def divide(files: Sequence[str | Path], held_out: int, places: tuple[Path, Path, Path]) -> tuple[int, int]:
    """Divide conversations into held-out ones, at even distances, and two halves of the others, each a file.

    Args:
        files: files of `FEWEST` conversations or more.
        held_out: number of held-out conversations, at most a tenth of all.
        places: files to write: held out, first half, second half.

    Returns:
        Numbers of held-out and of other conversations.

    Raises:
        DataError: a file cannot be read, or a line is no conversation.
    """
    rows = [record for file in files for record in read_records(file)]
    count = min(held_out, len(rows) // FEWEST)
    chosen = {place * len(rows) // count for place in range(count)}
    parts: list[list[str]] = [[], [], []]
    for number, row in enumerate(rows):
        part = 0 if number in chosen else 1 + number % 2
        entry = {"conversation_id": row.id, "conversations": row.messages, **row.rest}
        parts[part].append(json.dumps(entry, ensure_ascii=False) + "\n")
    for place, lines in zip(places, parts, strict=True):
        with replacing(place) as file:
            file.write_text("".join(lines), encoding="utf-8")
    return len(parts[0]), len(rows) - len(parts[0])


def sort_lines(file: Path) -> None:
    """Sort the lines of a file of conversations by their ids, so that its content does not depend on restarts."""
    rows = sorted((str(row.entry["conversation_id"]), row.number, row.entry) for row in read_rows(file))
    with replacing(file) as part:
        part.write_text("".join(json.dumps(entry, ensure_ascii=False) + "\n" for _, _, entry in rows), encoding="utf-8")
