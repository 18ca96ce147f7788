"""Options for the training of EAGLE-1 heads."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from sametoken.heads.eagle.options import EagleLoss, EagleOptions
from sametoken.learning.training import Training


class Eagle1Options(EagleOptions):
    """Options for the architecture of an EAGLE-1 head."""

    fc_bias: bool = False
    """for eagle1: the fusion has a bias."""


class Eagle1Loss(EagleLoss):
    """Options for the loss of an EAGLE-1 head."""

    feature_weight: Annotated[float, Field(ge=0)] = 1.0
    """for eagle1: weight of the SmoothL1 loss on hidden states."""
    guess_weight: Annotated[float, Field(ge=0)] = 0.1
    """for eagle1: weight of the loss of guesses."""
    noise: Annotated[float, Field(ge=0)] = 0.2
    """for eagle1: width of uniform noise on the features that it reads; less in documents of over 512 tokens."""


TRAINING = Training(objective="sametoken.heads.eagle1.objective:Eagle1Objective", head=Eagle1Options, loss=Eagle1Loss)
