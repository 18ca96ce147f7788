"""Settings of training: the options of `options.training`, and those of kinds.

This module needs no torch, so that a wrong option is an error before anything is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import model_validator

from sametoken.kinds import Kind
from sametoken.learning.modes import ALIASES, MODES, TRAINED, modes_with
from sametoken.learning.training import Training
from sametoken.options.declaration import Settings
from sametoken.options.training import (
    LONGEST,
    ROW,
    DataSettings,
    HeadOptions,
    KeepSettings,
    LossOptions,
    RunSettings,
)

__all__ = [
    "ALIASES", "GROUPS", "LONGEST", "MODES", "ROW", "DataSettings", "HeadSettings", "KeepSettings", "LossSettings",
    "RunSettings", "TrainingSettings",
]  # fmt: skip


if TYPE_CHECKING:
    Mode = str
else:
    Mode = Literal[MODES]


class _Chosen(HeadOptions):
    """Options for the kind of draft."""

    mode: Mode = MODES[0]

    @model_validator(mode="after")
    def _read_in_this_mode(self) -> _Chosen:
        for name, field in type(self).model_fields.items():
            modes = modes_with("head", name) if name != "mode" else ()
            if not modes or getattr(self, name) == field.default:
                continue
            if self.method not in modes:
                raise ValueError(f"{name} is for mode {' or '.join(modes)}; leave it out for {self.mode}")
            if self.init_from is not None and name not in self.training.compared:
                raise ValueError(f"init_from keeps its architecture; leave {name} out")
        return self

    @property
    def method(self) -> str:
        """Mode with aliases resolved."""
        return ALIASES.get(self.mode, self.mode)

    @property
    def kind(self) -> Kind:
        """Kind of draft."""
        return TRAINED[self.method].kind

    @property
    def training(self) -> Training:
        """Training declaration of this kind of drafts."""
        return TRAINED[self.method].training


def _joined(name: str, *groups: type[Settings]) -> Any:
    """Class with the options of several classes, each once."""
    distinct = tuple(dict.fromkeys(groups))
    parts = [one for one in distinct if not any(issubclass(other, one) for other in distinct if other is not one)]
    return type(name, tuple(parts), {"__module__": __name__, "__doc__": groups[0].__doc__})


if TYPE_CHECKING:

    class HeadSettings(_Chosen): ...

    class LossSettings(LossOptions): ...

else:
    HeadSettings = _joined("HeadSettings", _Chosen, *(each.training.head for each in TRAINED.values()))
    LossSettings = _joined("LossSettings", LossOptions, *(each.training.loss for each in TRAINED.values()))
    _said = [f"{mode}: {each.kind.what}" for mode, each in TRAINED.items()]
    _said += [f"{alias} stands for {mode}" for alias, mode in ALIASES.items()]
    HeadSettings.model_fields["mode"].description = f"what is trained: {'; '.join(_said)}."

# Settings without effect on results, other than the order of sums.
FREE = ("train_bs", "gradient_accumulation_steps", "num_gpu", "fsdp", "fsdp_target", "device", "threads",
        "fsdp_transformer_layer_cls_to_wrap", "gradient_checkpointing")  # fmt: skip

GROUPS: tuple[type[Settings], ...] = (HeadSettings, LossSettings, RunSettings, KeepSettings, DataSettings)


class TrainingSettings(NamedTuple):
    """Settings of a run by groups."""

    head: HeadSettings
    loss: LossSettings
    run: RunSettings
    keep: KeepSettings

    def deciding(self) -> dict[str, Any]:
        """JSON values of the settings that determine the results, by name."""
        chosen = {**self.head.model_dump(mode="json"), **self.loss.model_dump(mode="json")}
        return chosen | {name: value for name, value in self.run.model_dump(mode="json").items() if name not in FREE}
