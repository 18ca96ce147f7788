"""The settings of a run, by their groups."""

from __future__ import annotations

from typing import NamedTuple

from sametoken.train.settings import HeadSettings, KeepSettings, LossSettings, RunSettings


class TrainingSettings(NamedTuple):
    """The settings of a run by their groups."""

    head: HeadSettings
    loss: LossSettings
    run: RunSettings
    keep: KeepSettings
