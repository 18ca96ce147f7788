"""Settings from a mode and its configuration with ModelOpt's names, and reduced vocabularies from files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sametoken.checkpoint.paths import user_path
from sametoken.errors import ConfigError, unknown_name
from sametoken.heads.modelopt import ModelOptSettings
from sametoken.heads.objective import HeadObjective
from sametoken.learning.modes import ALIASES, TRAINED
from sametoken.train.dataset.prepared import MANIFEST, Prepared

VOCABULARY = "draft_vocab_cache"


def read(mode: str, config: Mapping[str, Any]) -> tuple[type[HeadObjective], ModelOptSettings]:
    """Objective of a mode of `convert`, and the settings of its configuration.

    Raises:
        ConfigError: a name is unknown (the message has the nearest known one) or belongs to another mode, or its value
            is not supported.
    """
    modes = {name: each for name, each in TRAINED.items() if each.kind.weights == "head"}
    modes |= {alias: modes[name] for alias, name in ALIASES.items() if name in modes}
    if mode not in modes:
        raise ConfigError(unknown_name("mode", mode, modes))
    kind, training = modes[mode]
    objective: type[HeadObjective] = kind.load(training.objective)
    return objective, objective.modelopt.read(mode, training, config)


def read_vocabulary(place: str | None, vocab_size: int) -> Tensor | None:
    """Ascending ids of a reduced vocabulary.

    Args:
        place: directory of `sametoken prepare`, or a file d2t.pt of offsets from ModelOpt; None for all ids.

    Raises:
        ConfigError: there is no such vocabulary, or it belongs to another model.
    """
    if place is None:
        return None
    file = user_path(place)
    if (file / MANIFEST).exists():
        found = Prepared.open(file).draft_vocabulary
        if found is None:
            raise ConfigError(f"{VOCABULARY} {place}: prepared without --draft-vocab-size, expected with")
        ids = found.ids
    else:
        file = file / "d2t.pt" if file.is_dir() else file
        try:
            offsets = torch.load(file, map_location="cpu", weights_only=True)
            ids = (offsets.long() + torch.arange(len(offsets))).sort().values
        except Exception as error:  # any exception of torch for a file without a tensor
            raise ConfigError(f"{VOCABULARY} {place}: not a tensor of offsets ({error})") from error
    if not len(ids) or int(ids[0]) < 0 or int(ids[-1]) >= vocab_size or bool((ids[1:] == ids[:-1]).any()):
        raise ConfigError(
            f"{VOCABULARY} {place}: {len(ids)} tokens from {ids.min() if len(ids) else None} to "
            f"{ids.max() if len(ids) else None}, expected different ones of the model's {vocab_size}"
        )
    return ids
