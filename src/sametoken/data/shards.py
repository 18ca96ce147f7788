"""Splitting of a file of conversations into shards for several workers, and concatenation of shards.

All keys are kept. Only ids may be added, so that they differ across shards.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from sametoken.errors import ConfigError, DataError
from sametoken.files import make_directory, replacing
from sametoken.prompts.conversations import ID_KEYS, DataRow, read_rows

FILE_NAME = "train-{0:05d}-{0:05d}.jsonl"
MOST_SHARDS = 100_000  # limit of five digits


def shard(file: Path, directory: Path, lines: int, *, number: bool = True) -> list[Path]:
    """Split a .jsonl or .json file into `train-%05d-%05d.jsonl`, in order.

    Args:
        directory: created if missing; must not contain .jsonl files, so that shards of different files never mix.
        lines: most lines of a shard.
        number: set `conversation_id` of rows without id to their number in the file.

    Raises:
        ConfigError: the directory contains .jsonl files.
        DataError: the file cannot be read, or a shard cannot be written.
    """
    if found := sorted(directory.glob("*.jsonl")):
        raise ConfigError(f"{found[0]} is there already; expected a directory without .jsonl files")
    rows = (_numbered(row) if number else row for row in read_rows(file))
    made: list[Path] = []
    try:
        while batch := list(islice(rows, lines)):
            made.append(_name(directory, len(made)))
            _write(made[-1], batch)
    except BaseException:
        for path in made:
            path.unlink(missing_ok=True)
        raise
    if not made:
        raise DataError(f"{file} holds no conversations; expected at least one")
    return made


def _name(directory: Path, index: int) -> Path:
    if index == MOST_SHARDS:
        raise ConfigError(f"{directory} would need more than {MOST_SHARDS} shards; expected more lines per shard")
    return directory / FILE_NAME.format(index)


def combine(directory: Path, output: Path) -> tuple[int, int]:
    """Concatenate the .jsonl files of a directory, in the order of their names, without rows that are no conversation.

    The companions of a synthesised file (failures, settings) are left out.

    Returns:
        Number of files read and of lines written.

    Raises:
        ConfigError: there is nothing to combine, or the output exists.
        DataError: a file cannot be read or written.
    """
    files = [file for file in sorted(directory.glob("*.jsonl")) if not file.name.endswith(".failed.jsonl")]
    if not files:
        raise ConfigError(f"{directory} holds no .jsonl files; expected the directory of shards")
    if output.exists():
        raise ConfigError(f"{output} exists; expected a new file")
    return len(files), _write(output, (row for file in files for row in read_rows(file) if row.entry.keys() - ID_KEYS))


def _numbered(row: DataRow) -> DataRow:
    if any(row.entry.get(key) is not None for key in ID_KEYS):
        return row
    return row._replace(entry={**row.entry, "conversation_id": str(row.number)})


def _write(path: Path, rows: Iterable[DataRow]) -> int:
    """Write a file of lines atomically; return their number."""
    make_directory(path.parent)
    count = 0
    with replacing(path) as part, part.open("w", encoding="utf-8", newline="\n") as stream:
        for row in rows:
            count += 1
            try:
                stream.write(json.dumps(row.entry, ensure_ascii=False) + "\n")
            except UnicodeEncodeError as error:
                raise DataError(f"{row.where} has half of a surrogate pair; remove it") from error
    return count
