"""Options and defaults for the training of EAGLE-3 heads."""

from __future__ import annotations

from typing import Any

from sametoken.heads.eagle.options import EagleLoss, EagleOptions
from sametoken.heads.taps import default_taps
from sametoken.learning.training import Training


class Eagle3Options(EagleOptions):
    """Options for the architecture of an EAGLE-3 head."""

    taps: str | None = None
    """for eagle3: blocks of the target, from 0, whose outputs it reads, as 1,7,12; without it: 1, n // 2 - 1 and n - 4
    of n blocks."""
    norm_before_residual: bool = False
    """for eagle3: the residual starts from the normed hidden state; SGLang and TensorRT-LLM do not."""
    norm_before_fc: bool = False
    """for eagle3: one norm over all taps before they are fused."""
    fc_norm: bool | None = None
    """EAGLE 3.1: a norm for each tap; without it: yes for a new eagle3 head without norm_before_fc."""
    norm_output: bool | None = None
    """EAGLE 3.1: the next step reads the normed output; without it: yes for a new eagle3 head."""


def defaults(head: Eagle3Options) -> dict[str, Any]:
    """Default options of a new head: EAGLE 3.1, and three unrolled steps of equal weight."""
    newer = {} if head.init_from is not None else {"fc_norm": not head.norm_before_fc, "norm_output": True}
    return {**newer, "ttt_steps": 3, "loss_decay": 1.0}


TRAINING = Training(
    objective="sametoken.heads.eagle3.objective:Eagle3Objective",
    head=Eagle3Options,
    loss=EagleLoss,
    compared=("taps",),
    defaults=defaults,
    taps=default_taps,
    vocabulary=True,
    preferred=True,
)
