"""Training of a kind of draft as data: its options, and a reference to its objective. Nothing here needs torch.

A kind of drafter names a `Training`; its option classes join those of all kinds on the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sametoken.options.training import HeadOptions, LossOptions


@dataclass(frozen=True)
class Training:
    """Training of a kind of draft.

    Attributes:
        objective: reference "module:attribute" to its `learning.objective.Objective`.
        head: its options about the draft. `loss`: its options about what is minimised.
        compared: options of `head` that are compared with the draft of --init-from, so they may be given beside it.
        defaults: values of options that were not given, from the options of `head`.
        taps: the blocks of a target with so many that a new draft reads besides the last state, 0-based.
        vocabulary: a draft may guess among a part of the target's tokens.
        tree: its drafts are trees of a fixed shape, which can be measured.
        rewriting: the option of `loss` with which a draft writes answers of its own, "" for none.
        part: the directory within a run that keeps the best draft, "head" or "draft".
        preferred: this kind is trained where no mode is named.
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
