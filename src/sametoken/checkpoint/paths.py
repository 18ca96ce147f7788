"""Paths as users write them."""

from __future__ import annotations

from pathlib import Path

from sametoken.errors import ConfigError


def user_path(given: str | Path) -> Path:
    """A path with `~` and `~name` written out.

    Raises:
        ConfigError: there is no such user.
    """
    try:
        return Path(given).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{given}: there is no user {Path(given).parts[0][1:]!r}; write the path out") from error
