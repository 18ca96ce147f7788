"""What may become of a key of another server's configuration, and the one function that applies it.

A key is honoured, has no effect here (which is said), or is refused with the reason; there is no fourth case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, NamedTuple

from sametoken.errors import ConfigError, unknown_name

WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", dict: "keys and values",
         list: "a list", NoneType: "nothing"}  # fmt: skip


class Sets(NamedTuple):
    """Honoured; null is the same as leaving the key out.

    Attributes:
        setting: the name of our option that gets the value.
        convert: from their value to ours; raises `ValueError` with what was expected. None is the same value.
        note: what differs, for the documentation.
    """

    setting: str
    convert: Callable[[Any], Any] | None = None
    note: str = ""


class NoEffect(NamedTuple):
    """Accepted and reported.

    Attributes:
        kind: the type of its values.
        reason: why nothing here depends on it.
        usual: values that ask for what happens anyway, of which nothing is reported.
    """

    kind: type
    reason: str
    usual: tuple[Any, ...] = ()


class Only(NamedTuple):
    """Honoured for the values that say what happens here, refused for all others.

    Attributes:
        values: what it may be; None may always be.
        reason: why it may be nothing else, and what to do instead.
    """

    values: tuple[Any, ...]
    reason: str


class Group(NamedTuple):
    """Keys below a key.

    Attributes:
        keys: their rules.
        present, absent: a setting and its value where the group is there, and where it is null; null is an error
            where `absent` is None.
    """

    keys: Mapping[str, Rule]
    present: tuple[str, Any] | None = None
    absent: tuple[str, Any] | None = None


Rule = Sets | NoEffect | Only | Group
Table = Mapping[str, Rule]


class Given(NamedTuple):
    """A value of one of our settings and where it was said."""

    value: Any
    origin: str


@dataclass
class Translation:
    """What a configuration comes to here.

    Attributes:
        settings: by the names of our options.
        notes: what has no effect and why, a sentence each.
    """

    settings: dict[str, Given] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def set(self, setting: str, value: Any, origin: str) -> None:
        """Notes a value.

        Raises:
            ConfigError: another place says something else.
        """
        known = self.settings.setdefault(setting, Given(value, origin))
        if known.value is not value and known.value != value:  # NaN is not even itself
            raise ConfigError(
                f"{known.origin} and {origin} both set {setting}, to {known.value!r} and {value!r}; give one of them"
            )

    def add(self, other: Translation) -> None:
        """Joins what another place of the same rank says.

        Raises:
            ConfigError: the two contradict each other.
        """
        for setting, given in other.settings.items():
            self.set(setting, *given)
        self.notes += other.notes


def translate(
    stated: Mapping[str, Any], table: Table, place: str, elsewhere: Mapping[str, str] | None = None
) -> Translation:
    """Applies a table to what was stated.

    Args:
        stated: keys and values as they were read.
        table: the rules of all valid keys.
        place: what the keys are below, with what stands between, for example "spec.yml: kv_cache_config.".
        elsewhere: keys that are valid in other company, and which.

    Raises:
        ConfigError: a key is unknown, or its value is not possible here.
    """
    result = Translation()
    for key, value in stated.items():
        if key not in table:
            if elsewhere and key in elsewhere:
                raise ConfigError(f"{place}{key} {elsewhere[key]}; leave it out")
            raise ConfigError(f"{place.rstrip(' .:')}: {unknown_name('key', str(key), table)}")
        result.add(apply(table[key], value, f"{place}{key}"))
    return result


def apply(rule: Rule, value: Any, origin: str) -> Translation:
    """What one key with one value comes to.

    Raises:
        ConfigError: the value is not possible here.
    """
    result = Translation()
    match rule:
        case Sets(setting, convert, _):
            if value is not None:
                result.set(setting, _converted(value, convert, origin), origin)
        case Only(values, reason):
            if value is not None and not _among(value, values):
                raise ConfigError(f"{origin} = {value!r}: {reason}")
        case NoEffect(kind, reason, usual):
            if value is not None and not _is(value, kind):
                raise ConfigError(f"{origin} = {value!r}: expected {WORDS[kind]}")
            if value is not None and not _among(value, usual):
                result.notes.append(f"{origin} = {value!r} has no effect here: {reason}")
        case Group(keys, present, absent):
            said = present
            if value is None:
                if absent is None:
                    raise ConfigError(empty_group(origin))
                said, value = absent, {}
            elif not isinstance(value, Mapping):
                raise ConfigError(f"{origin} = {value!r}: expected {WORDS[dict]}")
            if said is not None:
                result.set(*said, origin)
            result.add(translate(value, keys, f"{origin}."))
    return result


def empty_group(origin: str, lost: Sequence[str] = ()) -> str:
    """Words for a group without keys; `lost` are keys of such a group that were found beside it."""
    if not lost:
        return f"{origin} is empty; expected its keys below it, indented by two spaces, or leave it out"
    return (
        f"{origin} is empty, and {', '.join(lost)} stand{'s' if len(lost) == 1 else ''} at the top level: the "
        "indentation was lost; indent the lines that belong to a group by two spaces"
    )


def _converted(value: Any, convert: Callable[[Any], Any] | None, origin: str) -> Any:
    if convert is None:
        return value
    try:
        return convert(value)
    except ValueError as error:
        raise ConfigError(f"{origin} = {value!r}: {error}") from error


def _is(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def _among(value: Any, values: Sequence[Any]) -> bool:
    """Equal and of the same type, since True == 1."""
    return any(type(value) is type(one) and value == one for one in values)
