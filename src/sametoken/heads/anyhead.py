"""The union of all heads of this package and of their configurations."""

from __future__ import annotations

from sametoken.heads.eagle.config import EagleConfig
from sametoken.heads.eagle.module import EagleHead
from sametoken.heads.medusa.config import MedusaConfig
from sametoken.heads.medusa.module import MedusaHeads

HeadConfig = EagleConfig | MedusaConfig
Head = EagleHead | MedusaHeads
