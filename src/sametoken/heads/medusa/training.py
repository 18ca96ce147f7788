"""Options for the training of Medusa heads."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from sametoken.learning.training import Training
from sametoken.options.training import HeadOptions, RoundedLoss


class MedusaOptions(HeadOptions):
    """Options for the architecture of Medusa heads."""

    medusa_num_heads: Annotated[int, Field(ge=1, le=128)] = 2
    """number of Medusa heads, each of which proposes one token."""
    medusa_num_layers: Annotated[int, Field(ge=0, le=128)] = 1
    """number of residual blocks of each Medusa head."""
    medusa_own_heads: bool = True
    """give every Medusa head an output layer of its own; otherwise all use the target's."""


TRAINING = Training(
    objective="sametoken.heads.medusa.objective:MedusaObjective",
    head=MedusaOptions,
    loss=RoundedLoss,
    compared=("medusa_num_heads",),
    tree=True,
)
