"""Specifications of data sets in the form of Model Optimizer's make_dataset: samples of several files, as one.

Its sources are names of published data sets. Here they are files next to the specification: NAME/SPLIT.jsonl,
NAME-SPLIT.jsonl, or NAME.jsonl for the split "all"; or .json.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sametoken.dialects.yaml_mapping import parse_mapping
from sametoken.errors import DataError, unknown_name
from sametoken.files import read_text

SUFFIXES = (".yaml", ".yml")
SEED = 42
ALIKE = 512  # characters of each turn in which conversations must differ
OUTPUT, SOURCE = ("filename", "global_limit", "sources"), ("name", "splits")


class Split(NamedTuple):
    """File of one split of a source, with its share (float), its number of conversations (int), or None for all."""

    file: Path
    name: str
    amount: float | None


class Mix(NamedTuple):
    """Splits of one output, and its number of conversations at most."""

    splits: list[Split]
    limit: int | None


def read_specification(file: Path) -> list[Mix]:
    """Mixes of a specification, without splits of which nothing is taken.

    Raises:
        DataError: the file is no specification, or a source has no file; the message names both.
    """
    try:
        stated = parse_mapping(read_text(file), str(file), "outputs: [...]")
    except ValueError as error:
        raise DataError(f"{file}: {error}") from error
    outputs = _list(stated, ("outputs",), str(file), "outputs")
    mixes = []
    for number, output in enumerate(outputs, 1):
        where = f"{file}: output {number}"
        sources = _list(output, OUTPUT, where, "sources")
        limit = output.get("global_limit")
        if limit is not None and not _amount(limit, where, whole=True):
            raise DataError(f"{where}: global_limit is 0, expected at least 1")
        mixes.append(Mix([each for source in sources for each in _splits(source, file.parent, where)], limit))
    if not any(mix.splits for mix in mixes):
        raise DataError(f"{file}: no split has an amount above 0; write a number, a share or 'all'")
    return mixes


def _list(stated: Any, keys: tuple[str, ...], where: str, key: str) -> list[Any]:
    """List under a key of a mapping that has no other keys than these."""
    if not isinstance(stated, Mapping) or not isinstance(stated.get(key), list):
        raise DataError(f"{where}: expected a mapping with a list under {key}, as make_dataset reads it")
    if unknown := [name for name in stated if name not in keys]:
        raise DataError(f"{where}: {unknown_name('key', str(unknown[0]), keys)}")
    return list(stated[key])


def _splits(source: Any, place: Path, where: str) -> Iterator[Split]:
    if not isinstance(source, Mapping) or not isinstance(source.get("name"), str) or set(source) != set(SOURCE):
        raise DataError(f"{where}: source {str(source)[:80]}, expected name and splits")
    name, splits = source["name"], source["splits"]
    listed = isinstance(splits, list) and all(isinstance(each, str) for each in splits)
    amounts = dict.fromkeys(splits, "all") if listed else splits
    if not isinstance(amounts, Mapping):
        raise DataError(f"{where}, {name}: splits is {splits!r}, expected a list, or split: amount")
    for split, amount in amounts.items():
        taken = None if amount == "all" else _amount(amount, f"{where}, {name}, {split}")
        if taken == 0:
            continue
        names = [f"{name}/{split}", f"{name}-{split}", *([name] if split == "all" else [])]
        files = [place / f"{each}{suffix}" for each in names for suffix in (".jsonl", ".json")]
        found = next((file for file in files if file.is_file()), None)
        if found is None:
            raise DataError(
                f"{where}: no file for {split} of {name}; nothing is downloaded here: put it at {files[0]}, or "
                f"give 0 for {split}"
            )
        yield Split(found, f"{name}-{split}", taken)


def _amount(given: Any, where: str, *, whole: bool = False) -> float:
    if isinstance(given, bool) or not isinstance(given, int if whole else int | float) or not 0 <= given < math.inf:
        raise DataError(f"{where}: {given!r}, expected a number of conversations{'' if whole else ', a share or all'}")
    return given


Entries = Callable[[Path], Iterator[dict[str, Any]]]


def mixed(mixes: list[Mix], read: Entries) -> Iterator[dict[str, Any]]:
    """Conversations of all mixes: a fixed random part of each split, without those that are nearly alike.

    Args:
        read: reader of the objects of a file.
    """
    for mix in mixes:
        chosen = [entry for split in mix.splits for entry in _taken(split, read)]
        if mix.limit is not None and mix.limit < len(chosen):
            chosen = _part(chosen, mix.limit)
        yield from chosen


def _taken(split: Split, read: Entries) -> list[dict[str, Any]]:
    different = {_opening(entry): entry for entry in map(_conversation, read(split.file))}
    entries = list(different.values())
    count = split.amount
    if isinstance(count, float):
        count = int(len(entries) * count)
    part = entries if count is None or count >= len(entries) else _part(entries, int(count))
    return [{**entry, "source": split.name} for entry in part]


def _part(entries: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    chosen = sorted(random.Random(SEED).sample(range(len(entries)), count))
    return [entries[place] for place in chosen]


def _conversation(entry: dict[str, Any]) -> dict[str, Any]:
    """Object with a conversation; MT-bench has `turns`, of which the first counts, and Magpie an `instruction`."""
    turns = entry.get("turns")
    prompt = turns[0] if isinstance(turns, list) and turns else entry.get("instruction")
    if isinstance(prompt, str) and not {"conversations", "messages"} & entry.keys():
        return {"conversations": [{"role": "user", "content": prompt}]}
    return entry


def _opening(entry: dict[str, Any]) -> str:
    turns = entry.get("conversations", entry.get("messages"))
    if not isinstance(turns, list):
        return json.dumps(entry)
    texts = [turn.get("content", turn.get("value")) if isinstance(turn, Mapping) else turn for turn in turns]
    return json.dumps([text[:ALIKE] if isinstance(text, str) else text for text in texts])
