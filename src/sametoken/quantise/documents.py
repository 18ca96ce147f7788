"""Text that a model is calibrated with and evaluated on: documents of a file, or the prompts of this package."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from sametoken.checkpoint.tokenizer import Tokenizer
from sametoken.data.conversations import CONVERSATION_KEYS, ID_KEYS, DataRow, parse_record, read_rows
from sametoken.errors import DataError
from sametoken.prompts.files import parse_items
from sametoken.prompts.sources import BUILT_IN, Conversation, Source, encode_prompt, encode_texts

HELD_OUT = 3  # every so many documents one is held out
LONGEST = 2048  # tokens that documents are cut at


class Documents(NamedTuple):
    """Token ids of documents.

    Attributes:
        calibration, held_out: int64 [S] each; no document is in both.
        prompts: ids of the held-out documents' prompts, which a draft's acceptance is measured with.
        origin: where they are from, in words.
    """

    calibration: list[Tensor]
    held_out: list[Tensor]
    prompts: list[list[int]]
    origin: str


class _Document(NamedTuple):
    text: list[int]
    prompt: list[int]


def read_documents(file: str | None, tokenizer: Tokenizer, longest: int, most: tuple[int, int]) -> Documents:
    """The first documents of a file, or the package's prompts; every third one is held out.

    Args:
        file: JSON lines with conversations, texts or prompts; None for the package's prompts.
        longest: tokens that the model can read.
        most: tokens of calibration and of held-out documents at most.

    Raises:
        DataError: the file is unreadable, a line is none of these, or fewer than three documents are there.
        RequestError: a line is no prompt.
    """
    found = _of_file(file, tokenizer) if file else (_Document(ids, ids) for _, ids in encode_texts(tokenizer))
    parts: tuple[list[Tensor], list[Tensor]] = ([], [])
    prompts, left = [], list(most)
    for number, document in enumerate(found):
        side = int(number % HELD_OUT == HELD_OUT - 1)
        ids = document.text[: min(longest, LONGEST, left[side])]
        if len(ids) > 1:
            parts[side].append(torch.tensor(ids))
            left[side] -= len(ids)
            if side:
                prompts.append(document.prompt)
        if max(left) < 2:
            break
    if not all(parts):
        raise DataError(f"{file or 'prompts'}: fewer than {HELD_OUT} documents, expected {HELD_OUT} or more")
    return Documents(*parts, prompts, file or f"the {len(BUILT_IN)} built-in prompts")


def _of_file(file: str, tokenizer: Tokenizer) -> Iterator[_Document]:
    for row in read_rows(file):
        if (found := _document(row, tokenizer)) is not None:
            yield found


def _document(row: DataRow, tokenizer: Tokenizer) -> _Document | None:
    """None for a row without text."""
    if isinstance(text := row.entry.get("text"), str):
        ids = tokenizer.encode(text)
        return _Document(ids, ids[: max(1, len(ids) // 4)])
    source: Source
    if any(key in row.entry for key in CONVERSATION_KEYS):
        record = parse_record(row)
        if record is None:
            return None
        whole, messages = record.messages, record.messages
        while messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        source = Conversation(messages or whole)
        text = tokenizer.apply_chat_template(whole, add_generation_prompt=whole == messages)
        return _Document(tokenizer.encode(text, add_special_tokens=False), encode_prompt(tokenizer, source).ids)
    if set(row.entry) <= set(ID_KEYS):
        return None
    _, (item,) = parse_items([(row.where, row.entry)])
    ids = encode_prompt(tokenizer, item.source).ids
    return _Document(ids, ids)
