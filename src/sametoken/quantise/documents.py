"""Text for calibration and evaluation: documents of a file, or the prompts of this package."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from sametoken.checkpoint.tokenizer import Tokenizer
from sametoken.errors import DataError
from sametoken.prompts.conversations import DataRow, has_conversation, parse_record, read_rows
from sametoken.prompts.files import parse_item
from sametoken.prompts.sources import BUILT_IN, Conversation, encode_prompt, encode_texts

HELD_OUT = 3  # one of so many documents is held out
LONGEST = 2048  # longest document, in tokens; longer ones are cut


class Documents(NamedTuple):
    """Token ids of documents.

    Attributes:
        calibration: documents for calibration, int64 [S] each.
        held_out: other documents for evaluation, int64 [S] each.
        prompts: prompts of the held-out documents, for the acceptance of a draft.
        origin: description of the source.
    """

    calibration: list[Tensor]
    held_out: list[Tensor]
    prompts: list[list[int]]
    origin: str


class _Document(NamedTuple):
    text: list[int]
    prompt: list[int]


def read_documents(file: str | None, tokenizer: Tokenizer, longest: int, most: tuple[int, int]) -> Documents:
    """Read the first documents of a file, or the package's prompts; every third one is held out.

    Args:
        file: JSON lines with conversations, texts or prompts; None for the package's prompts.
        tokenizer: tokenizer of the model.
        longest: context length of the model, in tokens.
        most: greatest number of tokens of calibration and of held-out documents.

    Raises:
        DataError: the file is unreadable, a line has another format, or there are fewer than three documents.
        RequestError: a line is not a valid prompt.
    """
    found = _of_file(file, tokenizer) if file else (_Document(ids, ids) for _, ids in encode_texts(tokenizer))
    parts: tuple[list[Tensor], list[Tensor]] = ([], [])
    prompts, left = [], list(most)
    for number, document in enumerate(each for each in found if len(each.text) > 1):
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
    """Document of a row; None for a row without text."""
    if isinstance(text := row.entry.get("text"), str):
        ids = tokenizer.encode(text)
        return _Document(ids, ids[: max(1, len(ids) // 4)])
    if not has_conversation(row):
        _, item = parse_item(row)
        assert item is not None
        ids = encode_prompt(tokenizer, item.source).ids
        return _Document(ids, ids)
    record = parse_record(row)
    if record is None:
        return None
    asked = record.prompt()
    text = tokenizer.apply_chat_template(record.messages, add_generation_prompt=asked == record.messages)
    prompt = encode_prompt(tokenizer, Conversation(asked or record.messages))
    return _Document(tokenizer.encode(text, add_special_tokens=False), prompt.ids)
