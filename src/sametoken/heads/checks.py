"""The check that configurations of heads make of their own values."""

from __future__ import annotations

from typing import Any

from sametoken.errors import ConfigError


def check(holds: bool, name: str, got: Any, expected: str) -> None:
    """Raise `ConfigError` with the name, what was got and what was expected unless `holds`."""
    if not holds:
        raise ConfigError(f"{name} of the head is {got!r}, expected {expected}")
