"""The modes of `sametoken train`: which kinds of drafts can be trained, by the names that the command knows them by."""

from __future__ import annotations

import logging
from typing import Literal, NamedTuple

from sametoken.errors import ConfigError
from sametoken.kinds import Kind, kinds
from sametoken.learning.training import Training

LOG = logging.getLogger("sametoken")


class Trained(NamedTuple):
    """A kind of draft that can be trained."""

    kind: Kind
    training: Training


def _trained() -> dict[str, Trained]:
    """The kinds that can be trained by their modes, the preferred one first; one that is broken is left out."""
    found: list[Trained] = []
    for kind in kinds():
        try:
            if kind.objective:
                found.append(Trained(kind, _training(kind)))
        except ConfigError as error:
            LOG.warning(f"cannot be trained: {error}")
    found.sort(key=lambda each: not each.training.preferred)
    return {each.kind.aliases["train"][0]: each for each in found}


def _training(kind: Kind) -> Training:
    found = kind.load(kind.objective)
    if not isinstance(found, Training):
        raise ConfigError(
            f"drafter {kind.name!r} of {kind.source}: {kind.objective} is {found!r}, expected a Training; update or "
            f"uninstall {kind.source}"
        )
    return found


TRAINED = _trained()
# Modes that name a family, and the member that each stands for.
ALIASES = {alias: mode for mode, each in TRAINED.items() for alias in each.kind.aliases["train"][1:]}
MODES = tuple(name for each in TRAINED.values() for name in each.kind.aliases["train"])


def modes_with(group: Literal["head", "loss"], name: str) -> tuple[str, ...]:
    """The modes that read an option of a group, () if every mode does."""
    reading = tuple(mode for mode, each in TRAINED.items() if name in getattr(each.training, group).model_fields)
    return reading if len(reading) < len(TRAINED) else ()


def meaning(alias: str) -> str:
    """Meaning of a mode that names a family, in words."""
    return f"means {ALIASES[alias]}, {TRAINED[ALIASES[alias]].kind.what}"
