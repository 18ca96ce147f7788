"""Directories of targets and drafts by name, checked before weights are downloaded.

A draft may be given as the output directory of a training run: its head or draft is then used, with a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from sametoken import embedded
from sametoken.checkpoint.contents import trained_part
from sametoken.checkpoint.hub import read_config, read_json, resolve
from sametoken.checkpoint.tokenizer_files import has_tokenizer, load_tokenizer
from sametoken.kinds import states_head
from sametoken.model.config import ModelConfig

LOG = logging.getLogger("sametoken")
Check = Callable[[Path], object]


def target_directory(model: str, revision: str | None = None, check: Check | None = None) -> Path:
    """Directory of a target.

    Args:
        model: "embedded", a directory, or a Hub id.
        revision: branch, tag or commit of the Hub repository; None for its main branch.
        check: raises an error for a target by its configuration and tokenizer, before its weights are downloaded; None
            refuses targets that cannot be loaded.

    Raises:
        SametokenError: there is no such model, or it is refused.
    """
    return resolve(embedded.target(model), revision, check=check or _check_model)


def draft_directory(draft: str, revision: str | None = None, check: Check | None = None) -> Path:
    """Directory of a draft model or a head.

    Args:
        draft: embedded name, directory, output directory of a training run, or Hub id.
        revision: branch, tag or commit of the Hub repository; None for its main branch.
        check: as in `target_directory`, for draft models that have a tokenizer; heads are not checked.

    Raises:
        SametokenError: there is no such draft, or it is refused.
    """

    def check_draft(directory: Path) -> None:
        if not states_head(read_json(directory / "config.json") or {}):
            ModelConfig.from_hf(read_config(directory))
            if check is not None and has_tokenizer(directory):
                check(directory)

    directory = resolve(embedded.draft(draft), revision, check=check_draft)
    trained = trained_part(directory)
    if trained is None:
        return directory
    LOG.warning(f"{directory} is a training run; using the {trained.name} that it made, {trained}")
    return trained


def _check_model(directory: Path) -> None:
    ModelConfig.from_hf(read_config(directory))
    load_tokenizer(directory)
