"""Checks of options that divide or narrow a draft, before any process starts and before weights are read."""

from __future__ import annotations

from pathlib import Path

from sametoken.checkpoint.hub import read_config
from sametoken.errors import ConfigError
from sametoken.heads.read import is_head
from sametoken.model.config import ModelConfig
from sametoken.model.cut import cut
from sametoken.options.speculation import SpeculativeConfig
from sametoken.runtime.ranks import RankPart

OPTION = "draft_tensor_parallel_size"


def check_draft_options(draft: object, target_ranks: int, speculative: SpeculativeConfig) -> None:
    """Raise ConfigError if no draft of any kind can be divided or narrowed as `speculative` states.

    Args:
        draft: None for no draft.
    """
    draft_ranks, narrows = speculative.draft_tensor_parallel_size, speculative.narrows
    if draft_ranks not in (1, target_ranks):
        raise ConfigError(f"{OPTION} {draft_ranks}: expected 1, or tensor_parallel_size, which is {target_ranks}")
    if draft_ranks > 1 and draft is None:
        raise ConfigError(f"{OPTION} {draft_ranks}: there is no draft model to divide; leave it out")
    if narrows and draft is None:
        raise ConfigError(f"{narrows}: there is no draft model that guesses tokens; leave it out")
    if narrows and draft_ranks > 1:
        raise ConfigError(f"{narrows}: a draft that {OPTION} {draft_ranks} divides has all tokens; give one of both")


def check_draft_model(place: Path, target_ranks: int, speculative: SpeculativeConfig) -> None:
    """Check that the draft of a directory can be divided and narrowed as `speculative` states.

    Raises:
        ConfigError: the draft is a head, or the number of parts does not divide its attention heads; the error lists
            valid numbers.
        UnsupportedModelError: the architecture cannot be divided.
    """
    count = speculative.draft_tensor_parallel_size if target_ranks > 1 else 1
    if speculative.narrows and is_head(place, speculative.method):
        raise ConfigError(
            f"{speculative.narrows}: {place} is a head, whose vocabulary was chosen when it was trained; leave it out, "
            "or give a draft model"
        )
    if count > 1 and is_head(place, speculative.method):
        raise ConfigError(
            f"{OPTION} {count}: {place} is a head, which reads hidden states of the target that rank 0 alone has; only "
            "a draft model can be divided, use 1"
        )
    if count > 1:
        cut(ModelConfig.from_hf(read_config(place)), RankPart(0, count), OPTION)
