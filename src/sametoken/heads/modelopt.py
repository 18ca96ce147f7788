"""Settings of heads from ModelOpt's configuration: every name is either used, or refused with a reason.

The options of `sametoken train` for the kind are accepted too.
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
    """Settings of a mode, from ModelOpt's configuration.

    Attributes:
        head, loss: options of the kind in `sametoken train`.
        architecture: keys of config.json in which the head differs from the default.
        vocabulary: directory of `sametoken prepare`, or file d2t.pt, with a reduced vocabulary.
        report: true if the outputs include accuracies.
    """

    head: HeadOptions
    loss: LossOptions
    architecture: Mapping[str, Any]
    vocabulary: str | None = None
    report: bool = True


class ModelOptNames:
    """ModelOpt's and `sametoken train`'s names of options for a kind of head.

    Attributes:
        only: names with one supported value, and the reason.
    """

    def __init__(self, only: Mapping[str, tuple[Any, str]] | None = None) -> None:
        self.only = only or {}

    def read(self, mode: str, training: Training, config: Mapping[str, Any]) -> ModelOptSettings:
        """Translate the configuration of a mode.

        Raises:
            ConfigError: a name is unknown (the message has the nearest known one), or its value is not supported.
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
        """Raise for unknown names, and for values that are not supported."""
        for name, value in given.items():
            if name not in known:
                raise ConfigError(f"mode {mode!r}: {unknown_name('key', name, known)}")
            if name in self.only:
                expected, why = self.only[name]
                if value != expected and (value or expected):
                    raise ConfigError(f"{name} is {value!r}, expected {expected!r}: {why}")

    def std(self, chosen: ModelOptSettings, usual: float) -> float:
        """Standard deviation of initial random weights."""
        return float(chosen.architecture.get("initializer_range", usual))

    def configure(self, objective: Any, chosen: ModelOptSettings, target: ModelConfig, draft_ids: Tensor | None) -> Any:
        """Configuration of the head.

        Args:
            objective: `HeadObjective` of the kind.
            draft_ids: int64 [Vd] ids of a reduced vocabulary.

        Raises:
            ConfigError: the architecture contradicts the target or itself.
        """
        return replace(objective.configure(chosen.head, target, target.vocab_size), dtype=target.dtype)
