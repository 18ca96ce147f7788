"""Tokenizers of checkpoint directories.

`tokenizer.json` is read with the `tokenizers` library if transformers would use the file unchanged. Other layouts are
read with transformers, whose import takes more than a second.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers

from sametoken.checkpoint.chat import named_templates, read_templates
from sametoken.checkpoint.gguf import LINK
from sametoken.checkpoint.hub import read_json, transformers_tokenizer
from sametoken.checkpoint.taken_as_is import GAP, NAMED, is_taken_as_is, spelling
from sametoken.checkpoint.tokenizer import USUAL_CLASS, Tokenizer
from sametoken.checkpoint.tokenizer_trial import worded
from sametoken.errors import CheckpointError, RequestError, UnsupportedModelError, shown

# Patterns of file names; a directory with a match has a tokenizer.
FILES = ("tokenizer*", "vocab.json", "*.model", "*.tiktoken")


def has_tokenizer(directory: Path) -> bool:
    """True if a directory has a tokenizer; a draft may be stored without one."""
    return any(True for pattern in FILES for _ in directory.glob(pattern))


def load_tokenizer(directory: Path, model: Path | None = None) -> Tokenizer:
    """Load the tokenizer of a checkpoint directory.

    Args:
        directory: directory of the tokenizer's files.
        model: checkpoint whose end tokens are used; None for `directory`.

    Raises:
        CheckpointError: the tokenizer's files are missing or damaged.
        UnsupportedModelError: transformers has only a slow Python tokenizer for it.
    """
    if not has_tokenizer(directory):
        raise CheckpointError(
            f"{directory} has no tokenizer, expected tokenizer.json or tokenizer.model beside config.json; copy it "
            "there, or name a directory that has it with the setting tokenizer"
        )
    config = read_json(directory / "config.json") or {}
    settings = read_json(directory / "tokenizer_config.json") or {}
    ours = (directory / LINK).exists()  # tokenizer.json was written from a GGUF file
    content = None if ours else read_json(directory / "tokenizer.json")
    configs = [read_json((model or directory) / name) or {} for name in ("generation_config.json", "config.json")]
    configs += [inner for stated in configs if isinstance(inner := stated.get("text_config"), dict)]
    eos_ids = [index for stated in configs for index in _ids(stated.get("eos_token_id"))]
    templates = read_templates(directory, settings)
    if ours or (content is not None and is_taken_as_is(directory, config, settings, content)):
        named = {key: spelling(settings[key]) for key in (*NAMED, *GAP) if settings.get(key)}
        return Tokenizer(
            _backend(directory), named, templates, eos_ids, str(settings.get("tokenizer_class") or USUAL_CLASS)
        )
    rebuilt = transformers_tokenizer(directory)
    if not rebuilt.is_fast:
        raise UnsupportedModelError(
            f"{directory}: {type(rebuilt).__name__} exists only as a slow Python tokenizer; add a tokenizer.json"
        )
    templates = named_templates(rebuilt.chat_template)
    return Tokenizer(rebuilt.backend_tokenizer, rebuilt.special_tokens_map, templates, eos_ids, type(rebuilt).__name__)


def _backend(directory: Path) -> tokenizers.Tokenizer:
    file = directory / "tokenizer.json"
    try:
        with worded("be read"):
            return tokenizers.Tokenizer.from_file(str(file))
    except RequestError as error:
        raise CheckpointError(f"{file}: not a tokenizer ({error.__cause__}); download it again") from error


def _ids(stated: object) -> list[int]:
    """Ids in eos_token_id of a configuration, which may be absent, one id, or a list."""
    ids: list[Any] = [] if stated is None else stated if isinstance(stated, list) else [stated]
    if any(isinstance(token, bool) or not isinstance(token, int) for token in ids):
        raise CheckpointError(
            f"eos_token_id is {shown(stated)}, expected an id or a list of ids; correct the configuration"
        )
    return [token for token in ids if token >= 0]  # negative ids mean none
