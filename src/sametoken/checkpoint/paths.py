"""Expansion of paths from users, and JSON files that options name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sametoken.errors import ConfigError
from sametoken.files import json_object, parse_object


def user_path(given: str | Path) -> Path:
    """Path with `~` and `~name` expanded.

    Raises:
        ConfigError: there is no such user.
    """
    try:
        return Path(given).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{given}: there is no user {Path(given).parts[0][1:]!r}; write the path out") from error


def read_keys(option: str, file: str | None) -> dict[str, Any]:
    """Read the JSON object in a file that an option names, or in the option's own text; an empty one for None.

    Raises:
        ConfigError: there is no such file, or it is not a JSON object.
    """
    if file is None:
        return {}
    try:
        if file.startswith("{"):
            return parse_object(file)
        return json_object(user_path(file))
    except OSError as error:
        raise ConfigError(f"{option} {file}: {error.strerror}; expected a JSON file") from error
    except ValueError as error:
        raise ConfigError(f"{option} {file} {error}; write an object of keys and values") from error
