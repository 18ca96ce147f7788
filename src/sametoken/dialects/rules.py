"""Rules for keys of another server's configuration: a key sets an option of ours, has no effect, or is refused.

A table has one rule for each key. Tables in the source list a reason once, with all keys to which it applies.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sametoken.errors import ConfigError, unknown_name

WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", dict: "keys and values",
         list: "a list"}  # fmt: skip
KINDS = {kind.__name__: kind for kind in WORDS}


class Sets(NamedTuple):
    """Rule of a key that sets an option of ours; null means the option's default.

    Attributes:
        setting: name of our option.
        convert: function from the server's value to ours, which returns None for our default and raises `ValueError`
            with the expected values; None leaves values unchanged.
        note: difference between the two options, for the documentation.
    """

    setting: str
    convert: Callable[[Any], Any] | None = None
    note: str = ""


class NoEffect(NamedTuple):
    """Rule of a key that is accepted without effect.

    A value is reported, unless it is one of the usual values, which are the behaviour of this server.
    """

    kind: type
    reason: str
    usual: tuple[Any, ...] = ()


class Only(NamedTuple):
    """Rule of a key that is accepted with null and these values, which are the behaviour of this server.

    Other values are refused with the reason.
    """

    values: tuple[Any, ...]
    reason: str


class Group(NamedTuple):
    """Rule of a key that has keys below it.

    Attributes:
        keys: rules of the keys below it.
        present: option of ours and its value, set if the key has a mapping.
        absent: option of ours and its value, set if the key is null; None: null is an error.
    """

    keys: Mapping[str, Rule]
    present: tuple[str, Any] | None = None
    absent: tuple[str, Any] | None = None


Rule = Sets | NoEffect | Only | Group
Table = Mapping[str, Rule]


class Key(NamedTuple):
    """A key of a table, written as "name/another_name:type=value|value"; only one name is required."""

    names: tuple[str, ...]
    values: tuple[Any, ...]
    kind: type


def keys(words: str) -> Iterator[Key]:
    """Keys in a text that separates them by spaces."""
    for word in words.split():
        typed, _, listed = word.partition("=")
        names, _, kind = typed.partition(":")
        values = tuple(map(_value, listed.split("|"))) if listed else ()
        yield Key(tuple(names.split("/")), values, KINDS[kind] if kind else type(values[0]) if values else str)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def table(
    sets: Mapping[str, str], no_effect: Mapping[str, str], refused: Mapping[str, str], **own: Rule
) -> dict[str, Rule]:
    """Rules by key.

    Args:
        sets: keys, each with the option of ours that it sets.
        no_effect: reasons, each with keys that have no effect, and their usual values.
        refused: reasons, each with keys that are refused, and their allowed values.
        own: keys with rules of their own.
    """
    rules: dict[str, Rule] = {key: Sets(setting) for key, setting in sets.items()}
    for reason, words in no_effect.items():
        rules |= {key.names[0]: NoEffect(key.kind, reason, key.values) for key in keys(words)}
    for reason, words in refused.items():
        rules |= {key.names[0]: Only(key.values, reason) for key in keys(words)}
    return rules | own


def spelled(name: str) -> str:
    """An option as users write it; a name with leading dashes is unchanged."""
    return name if name.startswith("-") else f"--{name.replace('_', '-')}"


def described(rule: Rule, mark: str = "") -> str:
    """Description of a key's effect; `mark` is put before and after each option and value."""
    match rule:
        case Sets(setting, _, note):
            return f"sets {mark}{spelled(setting)}{mark}" + (f"; {note}" if note else "")
        case NoEffect(_, reason, _):
            return f"no effect: {reason}"
        case Only(values, reason):
            allowed = " or ".join(f"{mark}{str(value).lower()}{mark}" for value in values)
            return (f"only {allowed}: " if allowed else "refused: ") + reason
    return "keys below it"


class Given(NamedTuple):
    """Value of one of our options, and the place that set it."""

    value: Any
    origin: str


@dataclass
class Translation:
    """Translation of a configuration.

    Attributes:
        settings: values by the names of our options.
        notes: one line for each key without effect, with the reason.
    """

    settings: dict[str, Given] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def set(self, setting: str, value: Any, origin: str) -> None:
        """Set an option; raise `ConfigError` if another place set it to another value.

        Two mappings without a common key are merged.
        """
        known = self.settings.setdefault(setting, Given(value, origin))
        if isinstance(value, dict) and isinstance(known.value, dict) and not value.keys() & known.value.keys():
            self.settings[setting] = Given({**known.value, **value}, f"{known.origin} and {origin}")
            return
        if known.value is not value and known.value != value:  # `is not`: a NaN does not equal itself
            raise ConfigError(
                f"{known.origin} and {origin} both set {setting}, to {known.value!r} and {value!r}; give one of them"
            )

    def add(self, other: Translation) -> None:
        """Add the settings of another place of equal priority; raise `ConfigError` if one option gets two values."""
        for setting, given in other.settings.items():
            self.set(setting, *given)
        self.notes += other.notes


def translate(
    stated: Mapping[str, Any], table: Table, place: str, elsewhere: Mapping[str, str] | None = None
) -> Translation:
    """Apply a table to keys and values.

    Args:
        place: prefix of the keys in messages, for example "spec.yml: kv_cache_config.".
        elsewhere: keys that are valid in another configuration, each with a description of that configuration.

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
    """Apply the rule of one key to a value; raise `ConfigError` if the value is not possible here."""
    result = Translation()
    if isinstance(rule, Group):
        chosen = rule.present
        if value is None:
            if rule.absent is None:
                raise ConfigError(empty_group(origin))
            chosen, value = rule.absent, {}
        elif not isinstance(value, Mapping):
            raise ConfigError(f"{origin} = {value!r}: expected {WORDS[dict]}")
        if chosen is not None:
            result.set(*chosen, origin)
        result.add(translate(value, rule.keys, f"{origin}."))
    elif value is None:
        pass
    elif isinstance(rule, Sets):
        try:
            ours = rule.convert(value) if rule.convert else value
        except ValueError as error:
            raise ConfigError(f"{origin} = {value!r}: {error}") from error
        if ours is not None:
            result.set(rule.setting, ours, origin)
    elif isinstance(rule, Only):
        if not _among(value, rule.values):
            raise ConfigError(f"{origin} = {value!r}: {rule.reason}")
    elif not _is(value, rule.kind):
        raise ConfigError(f"{origin} = {value!r}: expected {WORDS[rule.kind]}")
    elif not _among(value, rule.usual):
        result.notes.append(f"{origin} = {value!r} has no effect here: {rule.reason}")
    return result


def empty_group(origin: str, lost: Sequence[str] = ()) -> str:
    """Message for a group without keys; `lost` are keys of the group that were found at the top level."""
    if not lost:
        return f"{origin} is empty; expected its keys below it, indented by two spaces, or leave it out"
    return (
        f"{origin} is empty, and {', '.join(lost)} stand{'s' if len(lost) == 1 else ''} at the top level: the "
        "indentation was lost; indent the lines that belong to a group by two spaces"
    )


def _is(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def _among(value: Any, values: Sequence[Any]) -> bool:
    """Return True if a value has the type and value of one of `values`; == alone would take True for 1."""
    return any(type(value) is type(one) and value == one for one in values)
