"""Checks of the number of processes that compute a draft, before any of them starts."""

from __future__ import annotations

from pathlib import Path

from sametoken.checkpoint.hub import read_config
from sametoken.errors import ConfigError
from sametoken.heads.read import is_head
from sametoken.model.config import ModelConfig
from sametoken.model.cut import cut
from sametoken.runtime.ranks import RankPart

OPTION = "draft_tensor_parallel_size"


def check_draft_ranks(draft: object, target_ranks: int, draft_ranks: int) -> None:
    """Raise ConfigError if no draft of any kind can be computed by `draft_ranks` processes.

    Args:
        draft: None for no draft.
    """
    if draft_ranks not in (1, target_ranks):
        raise ConfigError(f"{OPTION} {draft_ranks}: expected 1, or tensor_parallel_size, which is {target_ranks}")
    if draft_ranks > 1 and draft is None:
        raise ConfigError(f"{OPTION} {draft_ranks}: there is no draft model to divide; leave it out")


def check_cut_draft(place: Path, count: int) -> None:
    """Check that a draft can be divided into `count` parts.

    Raises:
        ConfigError: the draft is a head, or `count` does not divide its attention heads; the error lists valid counts.
        UnsupportedModelError: the architecture cannot be divided.
    """
    if is_head(place):
        raise ConfigError(
            f"{OPTION} {count}: {place} is a head, which reads hidden states of the target that rank 0 alone has; only "
            "a draft model can be divided, use 1"
        )
    cut(ModelConfig.from_hf(read_config(place)), RankPart(0, count), OPTION)
