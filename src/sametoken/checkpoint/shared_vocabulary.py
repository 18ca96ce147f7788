"""Check that two models share a vocabulary."""

from __future__ import annotations

import logging
from collections.abc import Callable
from filecmp import cmp
from pathlib import Path

from sametoken.checkpoint.gguf import LINK
from sametoken.checkpoint.hub import read_config, read_json
from sametoken.checkpoint.tokenizer import Tokenizer
from sametoken.checkpoint.tokenizer_files import FILES, has_tokenizer, load_tokenizer
from sametoken.errors import DraftMismatchError
from sametoken.model.config import ModelConfig

LOG = logging.getLogger("sametoken")
SETTINGS = "tokenizer_config.json"
OLDER = ("special_tokens_map.json", "added_tokens.json")  # also read by transformers
CONFIGS = ("config.json", "generation_config.json")
READ = ("model_type", "eos_token_id", "text_config")


def check_draft_vocabulary(draft: Path, rows: int, target: Path | None, tokenizer: Callable[[], Tokenizer]) -> None:
    """Check that a draft model has the tokenizer and the number of output rows of its target.

    Args:
        draft: directory of the draft model.
        rows: output rows of the target.
        target: directory of the target; None if its tokenizer is set by `EngineConfig.tokenizer`.
        tokenizer: function that returns the target's tokenizer.

    Raises:
        DraftMismatchError: they differ.
    """
    stated = ModelConfig.from_hf(read_config(draft))
    if has_tokenizer(draft):
        if target is None or not same_files(target, draft):
            check_same_tokenizer(tokenizer(), load_tokenizer(draft))
    else:
        LOG.info("%s has no tokenizer of its own: its tokens are taken to be the target's", draft)
    if stated.vocab_size != rows:
        raise DraftMismatchError(f"{draft} has {stated.vocab_size} output rows, the target {rows}; they must be equal")


def same_files(target: Path, draft: Path) -> bool:
    """True if the tokenizer files of two checkpoints are equal, apart from chat templates.

    Equal files save loading the tokenizers to compare them: one of 150,000 tokens takes a second.
    """
    names = _names(target)
    try:
        equal = names == _names(draft) and all(cmp(target / name, draft / name, shallow=False) for name in names)
    except OSError:  # the error follows, with the file, when the tokenizer is read
        return False
    return equal and _stated(target) == _stated(draft)


def _names(directory: Path) -> set[str]:
    return {file.name for pattern in (*FILES, *OLDER) for file in directory.glob(pattern)} - {SETTINGS}


def _stated(directory: Path) -> tuple[object, ...]:
    settings = {**(read_json(directory / SETTINGS) or {})}
    settings.pop("chat_template", None)
    configs = [read_json(directory / name) or {} for name in CONFIGS]
    values = [config.get(key) for config in configs for key in READ]
    return (settings, (directory / LINK).exists(), *values)


def check_same_tokenizer(target: Tokenizer, draft: Tokenizer) -> None:
    """Check that token ids mean the same tokens in the target and in the draft.

    The vocabularies are compared id by id, and so are the special ids and BOS. One common end token is enough: an
    instruction-tuned target has more of them than a base draft. Padding rows of the models are ignored.

    Raises:
        DraftMismatchError: they differ; the message has the first difference.
    """
    ours, theirs = ({index: text for text, index in t.vocab().items()} for t in (target, draft))
    for index in sorted(ours.keys() | theirs.keys()):
        if ours.get(index) != theirs.get(index):
            raise DraftMismatchError(
                f"the draft has another vocabulary: token {index} is {target.token_text(index)!r} in the target and "
                f"{draft.token_text(index)!r} in the draft (target {len(ours)} tokens, draft {len(theirs)}); "
                "use a draft with the target's tokenizer"
            )
    if different := sorted(target.special_ids ^ draft.special_ids):
        whose = "target" if different[0] in target.special_ids else "draft"
        raise DraftMismatchError(
            f"token {different[0]} ({target.token_text(different[0])!r}) is special only in the {whose}; "
            "use a draft with the target's tokenizer"
        )
    if target.bos_id != draft.bos_id:
        raise DraftMismatchError(
            f"BOS is {target.bos_id} in the target and {draft.bos_id} in the draft; use a draft with the same one"
        )
    if set(target.eos_ids).isdisjoint(draft.eos_ids) and (target.eos_ids or draft.eos_ids):
        raise DraftMismatchError(
            f"EOS is {list(target.eos_ids)} in the target and {list(draft.eos_ids)} in the draft, none in common; "
            "use a draft with the same one"
        )
