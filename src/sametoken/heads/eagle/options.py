"""Options of training that all EAGLE heads have."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from sametoken.options.training import HeadOptions, RoundedLoss


class EagleOptions(HeadOptions):
    """Options for the architecture of an EAGLE head."""

    eagle_num_layers: Annotated[int, Field(ge=1, le=128)] = 1
    """number of blocks of an EAGLE head."""
    eagle_config: str | None = None
    """JSON file, or JSON object, with the architecture of the head in the names of config.json; its keys win over
    options."""
    draft_window: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    """number of tokens that an EAGLE head attends to; without it: all."""


class EagleLoss(RoundedLoss):
    """Options for the loss of an EAGLE head."""

    ttt_steps: Annotated[int, Field(ge=1, le=32)] | None = None
    """number of steps that an EAGLE head is unrolled for in training; without it: 3 for eagle3 and 1 for eagle1."""
