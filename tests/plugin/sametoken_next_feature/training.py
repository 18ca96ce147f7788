"""How next-feature heads are trained: their options on the command line."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from sametoken.learning.training import Training
from sametoken.options.training import HeadOptions, LossOptions


class NextFeatureOptions(HeadOptions):
    """The architecture of a next-feature head."""

    next_feature_inner_size: Annotated[int, Field(ge=1)] | None = None
    """for next-feature: width between its two linear layers; without it: twice the target's hidden size."""


class NextFeatureLoss(LossOptions):
    """What is minimised for a next-feature head."""

    next_feature_steps: Annotated[int, Field(ge=1, le=32)] = 3
    """for next-feature: guesses in a row that it is trained for."""


TRAINING = Training(
    objective="sametoken_next_feature.objective:NextFeatureObjective", head=NextFeatureOptions, loss=NextFeatureLoss
)
