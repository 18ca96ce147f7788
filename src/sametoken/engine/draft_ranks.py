"""Which drafts several processes can compute together, and by how many: refused before any of them is started."""

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
    """Raises ConfigError where no draft, whatever it is, can be computed by so many processes.

    Args:
        draft: None where there is none.
    """
    if draft_ranks not in (1, target_ranks):
        raise ConfigError(f"{OPTION} {draft_ranks}: expected 1, or tensor_parallel_size, which is {target_ranks}")
    if draft_ranks > 1 and draft is None:
        raise ConfigError(f"{OPTION} {draft_ranks}: there is no draft model to divide; leave it out")


def check_cut_draft(place: Path, count: int) -> None:
    """Refuses a draft that cannot be divided into so many parts.

    Raises:
        ConfigError: it is a head, or `count` does not divide its heads; says which numbers do.
        UnsupportedModelError: its architecture cannot be divided.
    """
    if is_head(place):
        raise ConfigError(
            f"{OPTION} {count}: {place} is a head, which reads hidden states of the target that rank 0 alone has; only "
            "a draft model can be divided, use 1"
        )
    cut(ModelConfig.from_hf(read_config(place)), RankPart(0, count), OPTION)
