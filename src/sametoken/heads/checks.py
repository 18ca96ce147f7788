"""Check of values, for configurations of heads."""

from __future__ import annotations

from typing import Any

from sametoken.errors import ConfigError


def check(holds: bool, name: str, got: Any, expected: str) -> None:
    """Raise `ConfigError` with the name, the actual and the expected value unless `holds`."""
    if not holds:
        raise ConfigError(f"{name} of the head is {got!r}, expected {expected}")
