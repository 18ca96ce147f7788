"""Names of targets and drafts into directories; what can be refused is refused before weights are downloaded.

A draft may be named by the training run that made it: its head or draft is then taken, and the log says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from sametoken import embedded
from sametoken.checkpoint.contents import trained_part
from sametoken.checkpoint.hub import read_config, read_json, resolve
from sametoken.checkpoint.tokenizer import has_tokenizer, load_tokenizer
from sametoken.kinds import states_head
from sametoken.model.config import ModelConfig

LOG = logging.getLogger("sametoken")
Check = Callable[[Path], object]


def target_directory(model: str, revision: str | None = None, check: Check | None = None) -> Path:
    """The directory of a target: "embedded", a directory, or a Hub id.

    Args:
        check: refuses a target by its configuration and tokenizer before its weights are downloaded, if they are to be;
            by default whatever cannot be loaded is refused.

    Raises:
        SametokenError: there is no such model, or it is refused.
    """
    return resolve(embedded.target(model), revision, check=check or _check_model)


def draft_directory(draft: str, revision: str | None = None, check: Check | None = None) -> Path:
    """The directory of a draft model or a head: an embedded name, a directory, a training run, or a Hub id.

    Args:
        check: as above, for draft models that have a tokenizer; what config.json calls a head is not checked.

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
