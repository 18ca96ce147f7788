"""Options for the training of draft models."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from sametoken.learning.training import Training
from sametoken.options.training import HeadOptions, LossOptions


class DraftOptions(HeadOptions):
    """Options for the sizes of a draft model."""

    draft_config: str | None = None
    """for draft: JSON file with the model's sizes in the names of a Llama's config.json."""


class DraftLoss(LossOptions):
    """Options for the loss of a draft model."""

    on_policy: Annotated[float, Field(ge=0, le=1)] = 0.0
    """for draft: share of the documents whose last answer the draft writes itself, for the target to judge."""

    @model_validator(mode="after")
    def _judged_by_the_target(self) -> DraftLoss:
        if self.on_policy and self.loss == "hard":
            raise ValueError("on_policy with loss hard would teach the draft its own words; use kl, tv or lk")
        return self


TRAINING = Training(
    objective="sametoken.heads.draft_model.objective:DraftObjective",
    head=DraftOptions,
    loss=DraftLoss,
    rewriting="on_policy",
    part="draft",
)
