"""Typed reads of a `config.json`: every wrong or missing value becomes an error that names its key.

Independent of architectures; `config.py` has the keys and the values of absent ones.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, MutableMapping
from typing import Any, TypeGuard, cast

from sametoken.errors import CheckpointError, UnsupportedModelError, shown

# Beyond these a file is damaged or hostile. No product of such sizes overflows.
MOST_WIDE = 1 << 24  # rows and columns of a weight
MOST_HEADS = 1 << 16  # heads of a layer, and dimensions of a head
MOST_LAYERS = 1024
MOST_POSITIONS = 1 << 24
MOST_WINDOW = (1 << 31) - 1
MOST_NUMBER = 1e30


class Keys:
    """Typed reads from a mapping. `null` and an absent key both mean the default; without a default they are errors."""

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self.values = values
        self.where = where

    def _bad(self, key: str, expected: str) -> CheckpointError:
        got = shown(self.values[key]) if key in self.values else "nothing"
        return CheckpointError(f"{self.where} has {got} for {key!r}, expected {expected}: is this file complete?")

    def over(self, values: Mapping[str, Any], absent: Mapping[str, Any] | None = None) -> Keys:
        """Copy with `values` in place of its own, and `absent` for keys that it lacks."""
        layers = [cast("MutableMapping[str, Any]", each) for each in (values, self.values, absent or {})]
        return Keys(ChainMap(*layers), self.where)

    def architecture(self) -> str:
        names = self.values.get("architectures")
        if not isinstance(names, list) or not names or not isinstance(names[0], str):
            raise self._bad("architectures", 'a list with one name, for example ["LlamaForCausalLM"]')
        return names[0]

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        value = default if value is None else value
        if not _is_positive(value):
            raise self._bad(key, "a positive number")
        return float(value)

    def optional_number(self, key: str, absent: float | None = None) -> float | None:
        """Number of a key, None for `null`, `absent` for an absent key."""
        return None if self.values.get(key, absent) is None else self.number(key, absent)

    def integer(self, key: str, default: int | None = None, most: int = MOST_WIDE, least: int = 1) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        if value == 0 and value is not False and not least:
            return 0
        if not _is_positive(value) or value != value // 1:
            raise self._bad(key, "a positive integer" if least else "0 or a positive integer")
        if value > most:
            raise self._bad(key, f"at most {most}")
        return int(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self._bad(key, "true or false")
        return value

    def choice(self, key: str, default: str, known: tuple[str, ...]) -> str:
        value = self.values.get(key)
        value = default if value is None else value
        if value not in known:
            raise UnsupportedModelError(f"{self.where} has {shown(value)} for {key!r}; supported: {', '.join(known)}")
        return str(value)

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        value = self.values.get(key)
        if not isinstance(value, list) or len(value) != length:
            raise self._bad(key, f"a list of {length} numbers")
        if not all(map(_is_positive, value)):
            raise self._bad(key, f"a list of {length} positive numbers")
        return tuple(float(x) for x in value)

    def token_ids(self, key: str, default: tuple[int, ...]) -> tuple[int, ...]:
        """Token ids of a key: one id, a list, or `null` or a negative id for none; only an absent key means the
        default.
        """
        value = self.values.get(key, list(default))
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(x, bool) or not isinstance(x, int) for x in ids):
            raise self._bad(key, "a token id, a list of token ids or null")
        return tuple(x for x in ids if x >= 0)

    def mapping(self, key: str) -> Mapping[str, Any]:
        value = self.values.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self._bad(key, "an object or null")
        return value or {}


def _is_positive(value: Any) -> TypeGuard[int | float]:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 < value <= MOST_NUMBER
