"""Prompts for a gap in a text (fill in the middle): the texts before and after it, with marks of the vocabulary.

Source: llama.cpp's format_infill (server-common.cpp), which finds marks by the same names (llama-vocab.cpp).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from sametoken.errors import RequestError
from sametoken.server.text_request import Infill

BUDGET = 2048  # tokens of the file around the gap, at most: three quarters before the gap, one quarter after it
SNIPPET = "\n\n--- snippet ---\n\n"
# Spellings of the marks before the prefix, the suffix and the middle. A checkpoint may name its own marks
# (`fim_pre_token` and others), which have priority.
PREFIX = (
    "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>",
    "<|code_prefix|>", "[PREFIX]",
)  # fmt: skip
SUFFIX = (
    "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>",
    "<|code_suffix|>", "[SUFFIX]",
)  # fmt: skip
MIDDLE = (
    "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>", "[MIDDLE]",
)  # fmt: skip
REPOSITORY = ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>")
FILE = ("<|file_sep|>", "<|file_separator|>")
PAD = ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>")


class Marks(NamedTuple):
    """Token ids of a vocabulary's marks; None for an optional mark that the vocabulary does not have.

    Attributes:
        end_ids: marks that end a reply.
    """

    prefix: int
    suffix: int
    middle: int
    repository: int | None
    file: int | None
    end_ids: tuple[int, ...]


class Vocabulary(Protocol):
    """Look-up of token ids, by the token's text or by a name in the checkpoint."""

    def token_id(self, text: str) -> int | None: ...
    def named_id(self, name: str) -> int | None: ...


def find_marks(vocabulary: Vocabulary) -> Marks | None:
    """Find the marks of a vocabulary; None if the vocabulary does not support a gap."""

    def first(name: str, spellings: Sequence[str]) -> int | None:
        found = (vocabulary.named_id(name), *map(vocabulary.token_id, spellings))
        return next((token for token in found if token is not None), None)

    prefix, suffix = first("fim_pre_token", PREFIX), first("fim_suf_token", SUFFIX)
    middle = first("fim_mid_token", MIDDLE)
    if prefix is None or suffix is None or middle is None:
        return None
    repository, file = first("fim_rep_token", REPOSITORY), first("fim_sep_token", FILE)
    end_ids = tuple(mark for mark in (first("fim_pad_token", PAD), repository, file) if mark is not None)
    return Marks(prefix, suffix, middle, repository, file, end_ids)


def infill_ids(
    asked: Infill, marks: Marks | None, encode: Callable[[str], list[int]], begin: Sequence[int], context: int
) -> list[int]:
    """Token ids of the prompt for a gap.

    Args:
        encode: tokenizer of a text, without BOS.
        begin: BOS if the model's prompts begin with it, else empty.
        context: largest number of tokens of prompt and reply together.

    Raises:
        RequestError: the vocabulary has no marks.
    """
    if marks is None:
        raise RequestError(
            "this model's vocabulary has no marks for a gap in a text; expected a prompt without a suffix",
            field="suffix",
            advice="use a model that was trained to fill in the middle",
        )
    budget = min(BUDGET, context // 2)
    before, after, begun = encode(asked.prefix), encode(asked.suffix), encode(asked.begun)
    before = before[max(0, len(before) - 3 * budget // 4) :]
    after = after[: max(0, budget // 4 - 2 - len(begun))]
    middle = [marks.prefix, *before, *begun, marks.suffix, *after, marks.middle]
    others = _others(asked, marks, encode) if asked.files else []
    room = max(0, context - len(middle) - len(begin) - budget)
    return [*begin, *others[max(0, len(others) - room) :], *middle]


def _others(asked: Infill, marks: Marks, encode: Callable[[str], list[int]]) -> list[int]:
    ids = [] if marks.repository is None else [marks.repository, *encode("myproject\n")]
    for name, text in asked.files:
        ids += encode(SNIPPET) if marks.file is None else [marks.file, *encode(f"{name}\n")]
        ids += encode(text)
    return ids if marks.file is None else [*ids, marks.file, *encode("filename\n")]
