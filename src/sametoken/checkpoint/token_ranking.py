"""Tokens that a draft model with a smaller vocabulary guesses: special tokens, then those that texts use most.

Without a file, the order of the ids stands for that: byte-pair encoding merges the most frequent pair first, and gives
each merge the next id. SentencePiece puts single characters behind the merges, also the most frequent first.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from sametoken.checkpoint.paths import user_path
from sametoken.checkpoint.tokenizer import BYTE_TOKEN, Tokenizer
from sametoken.errors import ConfigError, shown
from sametoken.options.speculation import SpeculativeConfig

LOG = logging.getLogger("sametoken")
FILE = "draft_token_map"  # option
FORMS = "a list of token ids, the most used first, or an object of counts by id (.json), or a tensor of ids (.pt)"


def draft_tokens(tokenizer: Tokenizer, rows: int, speculative: SpeculativeConfig) -> Tensor | None:
    """Ids [N] int64 of a draft model's vocabulary: special tokens first, then others by rank; None for all tokens.

    Args:
        tokenizer: tokenizer of target and draft.
        rows: tokens of the models.
        speculative: settings, with N or a file of tokens.

    Raises:
        ConfigError: the file cannot be read, or special tokens are more than half of the vocabulary.
    """
    size, file = speculative.draft_vocab_size, speculative.draft_token_map
    if size is not None and size >= rows:
        LOG.info(f"draft_vocab_size {size}: the draft has {rows} tokens, and guesses among all of them")
        return None
    ranked = _ranked(tokenizer) if file is None else read_tokens(file, rows)
    special = sorted(token for token in _special(tokenizer) if token < rows)
    found = list(dict.fromkeys(chain(special, (token for token in ranked if token < rows))))[:size]
    if 2 * len(special) > len(found):
        raise ConfigError(
            f"{speculative.narrows}: the draft would guess among {len(found)} tokens, of which {len(special)} are "
            f"special ones that are always kept; expected {2 * len(special)} at least"
        )
    return torch.tensor(found)


def _special(tokenizer: Tokenizer) -> set[int]:
    """Tokens whose rank is no frequency: added ones, ends of texts, and single bytes for rare characters."""
    in_bytes = (index for text, index in tokenizer.vocab().items() if BYTE_TOKEN.fullmatch(text))
    return {*tokenizer.added_ids, *tokenizer.eos_ids, *in_bytes}


def _ranked(tokenizer: Tokenizer) -> list[int]:
    """Ids by about how often they occur: in their order, but single characters at equal distances from the first on."""
    characters = sorted(index for text, index in tokenizer.vocab().items() if len(text) == 1)
    distance = tokenizer.vocab_size / max(len(characters), 1)
    rank: list[float] = [*range(tokenizer.vocab_size)]
    for place, index in enumerate(characters):
        rank[index] = min(index, place * distance)
    return sorted(range(tokenizer.vocab_size), key=rank.__getitem__)


def read_tokens(name: str, rows: int) -> Sequence[int]:
    """Ids of a file, the most used first.

    A tensor with repeated numbers has offsets (d2t of an EAGLE head: id of token i is i + number).

    Args:
        rows: tokens of the model.

    Raises:
        ConfigError: there is no such file, or it has other contents.
    """
    file = user_path(name)
    try:
        found = _read(file)
    except Exception as error:  # any exception of torch for a file without a tensor
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(f"{FILE} {name}: {reason}; expected {FORMS}") from error
    if len(set(found)) < len(found):
        found = [place + offset for place, offset in enumerate(found)]
    wrong = [token for token in found if not 0 <= token < rows]
    if wrong or not found or len(set(found)) < len(found):
        what = f"token {wrong[0]}" if wrong else f"{len(found)} tokens, {len(set(found))} different ones"
        raise ConfigError(f"{FILE} {name}: got {what}, expected different ids from 0 to {rows - 1}")
    return found


def _read(file: Path) -> list[int]:
    """Integers of a file."""
    if file.suffix == ".json":
        found: Iterable[object] = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            counts = {int(token): int(count) for token, count in found.items()}
            return sorted(counts, key=lambda token: (-counts[token], token))
    else:
        found = torch.as_tensor(torch.load(file, map_location="cpu", weights_only=True)).tolist()
    numbers = list(found)
    if wrong := [each for each in numbers if isinstance(each, bool) or not isinstance(each, int)]:
        raise ValueError(f"got {shown(wrong[0])}")
    return numbers
