"""Embedded model for commands without a model, with a note in the first line; never used with the user's data."""

from __future__ import annotations

import os
from types import ModuleType

from sametoken import embedded
from sametoken.commands.options import Chosen
from sametoken.errors import ConfigError

BUILT_IN = "builtin"  # the workload that comes with the package


def note_of(command: str, module: ModuleType, model: str | None, values: Chosen) -> str | None:
    """Note that a command uses the embedded model because none was named; None in other cases and on further ranks.

    Raises:
        ConfigError: the command has data of the user, which is never meant for the embedded model.
    """
    if not falls_back(module, model, values):
        return None
    name = "MODEL" if takes_model(module) else "--target MODEL"
    data = values.get("data") or next((each for each in values.get("workload") or () if each != BUILT_IN), None)
    if data is not None:
        place = f"sametoken {command} {name}" if name == "MODEL" else f"{name} beside the head"
        raise ConfigError(
            f"got data and no {name}; expected {place}; '{embedded.NAME}' is the small model that comes with the "
            "package"
        )
    first = os.environ.get("RANK", "0") == "0"
    return f"no {name} given: using '{embedded.NAME}', the small model that comes with the package" if first else None


def falls_back(module: ModuleType, model: str | None, values: Chosen) -> bool:
    """Return True if a command uses the embedded model although the user did not name it."""
    if takes_model(module):
        on_server = isinstance(values.get("url"), str)  # the server has a model of its own
        own = hasattr(module, "DEFAULT")  # the command has another model without MODEL
        return model is None and values.get("model") is None and not on_server and not own
    return values.get("target") == embedded.NAME and "target" not in values.given and model != embedded.NAME


def takes_model(module: ModuleType) -> bool:
    """Return True if the positional argument of a command is its model."""
    return not hasattr(module, "ARGUMENT") or (module.ARGUMENT is not None and module.ARGUMENT.metavar == "MODEL")
