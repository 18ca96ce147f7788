"""A head's settings from ModelOpt's configuration names: every name is honoured, or refused with the reason.

Options of `sametoken train` of the same kind are taken under their own names too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from sametoken.errors import ConfigError, unknown_name
from sametoken.learning.training import Training
from sametoken.model.config import ModelConfig
from sametoken.options.training import HeadOptions, LossOptions

FROZEN = (True, "drafts never change the target")


class ModelOptSettings(NamedTuple):
    """Settings of a mode and its configuration.

    Attributes:
        head, loss: options of the kind, as `sametoken train` has them.
        architecture: names of config.json that the head's architecture differs by.
        vocabulary: directory of `sametoken prepare`, or file d2t.pt, of a reduced vocabulary.
        report: whether accuracies are among the outputs.
    """

    head: HeadOptions
    loss: LossOptions
    architecture: Mapping[str, Any]
    vocabulary: str | None = None
    report: bool = True


class ModelOptNames:
    """The names that ModelOpt and `sametoken train` have for a kind of head.

    Attributes:
        only: names with one possible value here, and why.
    """

    def __init__(self, only: Mapping[str, tuple[Any, str]] | None = None) -> None:
        self.only = only or {}

    def read(self, mode: str, training: Training, config: Mapping[str, Any]) -> ModelOptSettings:
        """Translate the configuration of a mode.

        Raises:
            ConfigError: a name is unknown (the nearest known one is given), or asks for what is not done here.
        """
        given = {name: value for name, value in config.items() if value is not None}
        shared = ("loss", "loss_decay", "loss_mix", "loss_mean")
        head = [name for name in training.head.model_fields if name != "init_from"]
        own = [name for name in training.loss.model_fields if name not in LossOptions.model_fields]
        self.refuse(mode, given, (*head, *shared, *own, *self.only))
        return ModelOptSettings(
            training.head(**{name: value for name, value in given.items() if name in head}),
            training.loss(**{name: value for name, value in given.items() if name in (*shared, *own)}), {},
        )  # fmt: skip

    def refuse(self, mode: str, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
        """Refuse unknown names, and other values than the one that is possible."""
        for name, value in given.items():
            if name not in known:
                raise ConfigError(f"mode {mode!r}: {unknown_name('key', name, known)}")
            if name in self.only:
                expected, why = self.only[name]
                if value != expected and (value or expected):
                    raise ConfigError(f"{name} is {value!r}, expected {expected!r}: {why}")

    def std(self, chosen: ModelOptSettings, usual: float) -> float:
        """Standard deviation of the first random weights."""
        return float(chosen.architecture.get("initializer_range", usual))

    def configure(self, objective: Any, chosen: ModelOptSettings, target: ModelConfig, draft_ids: Tensor | None) -> Any:
        """The architecture of the head.

        Args:
            objective: the `HeadObjective` of the kind.
            draft_ids: int64 [Vd] of a reduced vocabulary.

        Raises:
            ConfigError: the architecture contradicts the target or itself.
        """
        return replace(objective.configure(chosen.head, target, target.vocab_size), dtype=target.dtype)
