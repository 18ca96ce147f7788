"""Preparation of conversations: tokens and masks, cut to length, counted, and written to a directory."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sametoken.checkpoint.paths import user_path
from sametoken.checkpoint.tokenizer import Tokenizer
from sametoken.data.held_out import HeldOutRuns
from sametoken.errors import DataError, RequestError
from sametoken.files import make_directory, stamp, write_json, write_tensors
from sametoken.prompts.conversations import CONVERSATION_KEYS, DataRow, files_of, parse_record, read_rows, row_id
from sametoken.train.dataset.masks import Masked, Rules, mask_conversation, mask_text
from sametoken.train.dataset.prepared import (
    FORMAT,
    MANIFEST,
    SAMPLES,
    VOCABULARY,
    Counts,
    Manifest,
    Origin,
    Prepared,
    check_origin,
)
from sametoken.train.dataset.vocabulary import choose_vocabulary, count_tokens


class Tokenised(NamedTuple):
    """Tokenised row of the data with its id, before it is cut."""

    id: str
    masked: Masked


def tokenise(
    files: Iterable[str | Path],
    tokenizer: Tokenizer,
    *,
    end_of_turn: bool = True,
    all_tokens: bool = False,
    template: Mapping[str, Any] | None = None,
    leave_out: Callable[[DataRow], bool] = lambda row: False,
) -> Iterator[Tokenised]:
    """Tokenise the rows of files of conversations, in order; all tokens of a row with `text` and no messages count.

    Args:
        end_of_turn: true if the end token of an answer counts too.
        all_tokens: true if all tokens count, not only the assistant's.
        template: further variables of the chat template, besides messages and the row's tools.
        leave_out: true for rows that are skipped.

    Raises:
        DataError: a file is unreadable, a row is no conversation, or none of its tokens counts; the message has file
            and line.
    """
    for file in files:
        for row in read_rows(file):
            if leave_out(row):
                continue
            try:
                found = _tokenise(row, tokenizer, Rules(end_of_turn, template or {}), all_tokens)
            except RequestError as error:
                raise DataError(f"{row.where} (conversation {row_id(row)}): {error}") from error
            if found is not None:
                yield Tokenised(row_id(row), found)


def _messages(row: DataRow) -> list[dict[str, Any]]:
    """Messages of a row; its text as a user's."""
    if isinstance(text := row.entry.get("text"), str) and not any(row.entry.get(key) for key in CONVERSATION_KEYS):
        return [{"role": "user", "content": text}]
    record = parse_record(row)
    return [] if record is None else record.messages


def _tokenise(row: DataRow, tokenizer: Tokenizer, rules: Rules, all_tokens: bool) -> Masked | None:
    """Tokenise a row; None for a row without a conversation."""
    name = f"{row.where} (conversation {row_id(row)})"
    stated = any(row.entry.get(key) for key in CONVERSATION_KEYS)
    if not stated and isinstance(text := row.entry.get("text"), str):
        if not text:
            raise DataError(f"{name}: no token counts: the text is empty; remove the row")
        return mask_text(tokenizer, text)
    if (record := parse_record(row)) is None:
        return None
    if isinstance(tools := record.rest.get("tools"), list):
        rules = rules._replace(variables={"tools": tools, **rules.variables})
    if all_tokens:
        text = tokenizer.apply_chat_template(record.messages, add_generation_prompt=False, **rules.variables)
        tokens = tokenizer.encode(text, add_special_tokens=False)
        return Masked(tokens, [True] * len(tokens))
    try:
        return mask_conversation(tokenizer, record.messages, rules, cut=record.truncated)
    except DataError as error:
        raise DataError(f"{name}: {error}") from error


def prepare(
    files: Sequence[str | Path],
    directory: str | Path,
    tokenizer: Tokenizer,
    origin: Origin,
    progress: Callable[[], None] = lambda: None,
    exclude: str | Path | None = None,
) -> Prepared:
    """Write the samples of files of conversations; keep an existing directory with equal origin.

    Args:
        files: files of conversations.
        directory: directory to create or to keep.
        tokenizer: tokenizer of the target.
        origin: sources and settings, with `data_sha256` of `files` (see `data_digest`), and `exclude_sha256` likewise.
        progress: called after every row.
        exclude: file of held-out conversations; those that share text with its prompts (see `HeldOutRuns`) are left
            out.

    Raises:
        DataError: a row is no conversation, none of its tokens counts, the directory has another origin, or the disk
            is full.
    """
    overlap = _Overlap(
        None if exclude is None else HeldOutRuns(exclude, partial(tokenizer.encode, add_special_tokens=False))
    )
    rows = tokenise(
        files, tokenizer, end_of_turn=origin.end_of_turn, all_tokens=origin.all_tokens, template=origin.template,
        leave_out=overlap,
    )  # fmt: skip
    return prepare_rows(rows, directory, tokenizer, origin, progress, ", ".join(map(str, files)), overlap)


class _Overlap:
    """Test of rows for text that they share with held-out prompts; `found` counts such rows."""

    def __init__(self, held_out: HeldOutRuns | None) -> None:
        self.held_out, self.found = held_out, 0

    def __call__(self, row: DataRow) -> bool:
        shared = self.held_out is not None and self.held_out.shares(_messages(row))
        self.found += shared
        return shared


def prepare_rows(
    rows: Iterable[Tokenised], directory: str | Path, tokenizer: Tokenizer, origin: Origin,
    progress: Callable[[], None], source: str, overlap: _Overlap | None = None,
) -> Prepared:  # fmt: skip
    """Write samples as `prepare` does, from rows that are tokenised; `source` is their name in messages."""
    path, overlap = user_path(directory), overlap or _Overlap(None)
    if (path / MANIFEST).exists():
        check_origin(path, origin)
        return Prepared.open(path)
    gathered = _gather(rows, origin, progress, source, overlap)
    tensors = gathered.tensors()
    counted = count_tokens(tensors["tokens"], tensors["mask"], origin.vocab_size)
    coverage, vocabulary = None, None
    if origin.draft_vocab_size is not None:
        forced = tokenizer.special_ids.union(tokenizer.eos_ids)
        vocabulary = choose_vocabulary(counted, origin.draft_vocab_size, forced, fill=origin.fill_vocabulary)
        coverage = vocabulary.coverage(counted)
    make_directory(path)
    stamps = {SAMPLES: write_tensors(path / SAMPLES, tensors)}
    if vocabulary is not None:
        stamps[VOCABULARY] = write_tensors(path / VOCABULARY, vocabulary._asdict())
    counts = Counts(
        len(gathered.ids), len(gathered.tokens), int(counted.sum()), gathered.truncated, gathered.dropped,
        gathered.unserved, gathered.unended, int((counted > 0).sum()), coverage, overlap.found,
    )  # fmt: skip
    write_json(path / MANIFEST, Manifest(FORMAT, origin, counts, stamps).to_json())
    check_origin(path, origin)  # other processes may prepare it at the same time, with equal options only
    return Prepared.open(path)


def data_digest(files: Sequence[str | Path]) -> str:
    """SHA-256 of the concatenated files of conversations.

    Raises:
        DataError: a file cannot be read.
    """
    paths = [each for file in files for each in files_of(file)]
    try:
        return stamp(*paths).sha256
    except OSError as error:
        raise DataError(f"{error.filename}: {error.strerror}; expected a readable file of conversations") from error


class _Gathered:
    """Growing samples in compact arrays, since a corpus has too many tokens for Python lists."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.tokens, self.mask, self.stops = array("i"), bytearray(), array("q")
        self.truncated = self.dropped = self.unserved = self.unended = 0

    def add(self, name: str, masked: Masked, max_len: int) -> None:
        """Add the first `max_len` tokens of a sample, unless none of them counts."""
        tokens, mask = masked.tokens[:max_len], masked.mask[:max_len]
        self.truncated += len(masked.tokens) > max_len
        if not any(mask):
            self.dropped += 1
            return
        self.unserved += not masked.as_served
        self.unended += not masked.ended
        self.ids.append(name)
        self.tokens.extend(tokens)
        self.mask.extend(mask)
        self.stops.append(len(self.tokens))

    def tensors(self) -> dict[str, Tensor]:
        """Tensors for the file of samples."""
        ids = json.dumps(self.ids, ensure_ascii=False).encode()
        return {
            "tokens": torch.frombuffer(self.tokens, dtype=torch.int32),
            "mask": torch.frombuffer(self.mask, dtype=torch.bool),
            "ends": torch.frombuffer(self.stops, dtype=torch.int64),
            "ids": torch.frombuffer(bytearray(ids), dtype=torch.uint8),
        }


def _gather(
    rows: Iterable[Tokenised], origin: Origin, progress: Callable[[], None], source: str, overlap: _Overlap
) -> _Gathered:
    gathered = _Gathered()
    for name, masked in rows:
        if (largest := max(masked.tokens)) >= origin.vocab_size:
            raise DataError(
                f"conversation {name} holds token {largest}, but {origin.target} has {origin.vocab_size} tokens; its "
                "tokenizer belongs to another model"
            )
        gathered.add(name, masked, origin.max_len)
        progress()
    if not gathered.ids:
        what = f"of all {gathered.dropped} nothing counts in the first {origin.max_len} tokens; raise --max-len"
        if not gathered.dropped:
            left_out = f"all {overlap.found} share text with the prompts of --exclude"
            what = left_out if overlap.found else "no conversations"
        raise DataError(f"{source}: no samples: {what}")
    return gathered
