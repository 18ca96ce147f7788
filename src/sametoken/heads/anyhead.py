"""The union of all heads and of their configurations, and what is known of one."""

from __future__ import annotations

from dataclasses import dataclass

from sametoken.heads.eagle.config import EagleConfig
from sametoken.heads.eagle.module import EagleHead
from sametoken.heads.eagle.taps import Taps
from sametoken.heads.medusa.config import MedusaConfig
from sametoken.heads.medusa.module import MedusaHeads

HeadConfig = EagleConfig | MedusaConfig
Head = EagleHead | MedusaHeads


@dataclass(frozen=True)
class Described:
    """A head's configuration, the reading of its taps, who seems to have made it, and what was assumed."""

    config: HeadConfig
    taps: Taps | None
    producer: str
    notes: tuple[str, ...]
