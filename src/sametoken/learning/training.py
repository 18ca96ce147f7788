"""Declaration of the training of a kind of draft: options, and a reference to the objective. Needs no torch.

A kind of drafter refers to a `Training`, whose option classes are merged with those of all kinds on the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sametoken.options.training import HeadOptions, LossOptions


@dataclass(frozen=True)
class Training:
    """Declaration of the training of a kind of draft.

    Attributes:
        objective: reference "module:attribute" to a `learning.objective.Objective`.
        head: class of options for the draft.
        loss: class of options for the loss.
        compared: options of `head` that are checked against the draft of --init-from, and so may be given with it.
        defaults: function from the options of `head` to values of missing options.
        taps: function from the number of a target's blocks to the 0-based blocks that a new draft reads.
        vocabulary: true if the kind supports reduced vocabularies.
        tree: true if drafts are static trees, which can be measured.
        rewriting: option of `loss` for on-policy answers, "" if there is none.
        part: directory of the best draft within a run, "head" or "draft".
        preferred: true for the kind that is trained by default.
    """

    objective: str
    head: type[HeadOptions] = HeadOptions
    loss: type[LossOptions] = LossOptions
    compared: tuple[str, ...] = ()
    defaults: Callable[[Any], Mapping[str, Any]] = lambda head: {}
    taps: Callable[[int], tuple[int, ...]] = lambda layers: ()
    vocabulary: bool = False
    tree: bool = False
    rewriting: str = ""
    part: Literal["head", "draft"] = "head"
    preferred: bool = False
