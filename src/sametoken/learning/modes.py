"""Modes of `sametoken train`: the kinds of drafts that can be trained, by their names on the command line."""

from __future__ import annotations

import logging
from typing import Literal, NamedTuple

from sametoken.errors import ConfigError
from sametoken.kinds import Kind, kinds
from sametoken.learning.training import Training

LOG = logging.getLogger("sametoken")


class Trained(NamedTuple):
    """Kind of draft that can be trained, with its training declaration."""

    kind: Kind
    training: Training


def _trained() -> dict[str, Trained]:
    """Trainable kinds by mode, the preferred one first; broken ones are left out."""
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
# Modes that name a family, and the member that each denotes.
ALIASES = {alias: mode for mode, each in TRAINED.items() for alias in each.kind.aliases["train"][1:]}
MODES = tuple(name for each in TRAINED.values() for name in each.kind.aliases["train"])


def modes_with(group: Literal["head", "loss"], name: str) -> tuple[str, ...]:
    """Modes that read an option of a group, () if every mode does."""
    reading = tuple(mode for mode, each in TRAINED.items() if name in getattr(each.training, group).model_fields)
    return reading if len(reading) < len(TRAINED) else ()


def meaning(alias: str) -> str:
    """Description of a mode that names a family."""
    return f"means {ALIASES[alias]}, {TRAINED[ALIASES[alias]].kind.what}"
