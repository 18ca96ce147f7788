"""What a user can set about training, which `sametoken.options.training` declares, and files that options name."""

from __future__ import annotations

from typing import Any

from sametoken.checkpoint.paths import user_path
from sametoken.errors import ConfigError
from sametoken.files import json_object
from sametoken.options.training import (
    ALIASES,
    GROUPS,
    LONGEST,
    LOSS_ONLY_FOR,
    MODES,
    ONLY_FOR,
    ROW,
    DataSettings,
    HeadSettings,
    KeepSettings,
    LossSettings,
    RunSettings,
)

__all__ = [
    "ALIASES",
    "GROUPS",
    "LONGEST",
    "LOSS_ONLY_FOR",
    "MODES",
    "ONLY_FOR",
    "ROW",
    "DataSettings",
    "HeadSettings",
    "KeepSettings",
    "LossSettings",
    "RunSettings",
    "read_keys",
]


def read_keys(option: str, file: str | None) -> dict[str, Any]:
    """The JSON object in a file that an option names, an empty one for no file.

    Raises:
        ConfigError: there is no such file, or it holds something else.
    """
    if file is None:
        return {}
    try:
        return json_object(user_path(file))
    except OSError as error:
        raise ConfigError(f"{option} {file}: {error.strerror}; expected a JSON file") from error
    except ValueError as error:
        raise ConfigError(f"{option} {file} {error}; write an object of keys and values") from error
