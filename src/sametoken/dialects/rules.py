"""Rules for keys of another server's configuration: a key sets an option of ours, has no effect, or is refused.

A table gives each key one rule; a reason stands before all keys that it holds for.
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
    """Sets an option of ours; null is the same as leaving the key out."""

    setting: str
    convert: Callable[[Any], Any] | None = None  # their value to ours, None for our default; `ValueError`: expected
    note: str = ""  # what differs, for the documentation


class NoEffect(NamedTuple):
    """Accepted for values of a type and reported, but for the usual values, which ask for what happens anyway."""

    kind: type
    reason: str
    usual: tuple[Any, ...] = ()


class Only(NamedTuple):
    """Accepted for these values and null, which ask for what happens here; the reason refuses all others."""

    values: tuple[Any, ...]
    reason: str


class Group(NamedTuple):
    """Keys below a key; an option and its value where the group is there, and where it is null (without: an error)."""

    keys: Mapping[str, Rule]
    present: tuple[str, Any] | None = None
    absent: tuple[str, Any] | None = None


Rule = Sets | NoEffect | Only | Group
Table = Mapping[str, Rule]


class Key(NamedTuple):
    """A key as tables write it: "name/another_name:type=value|value", of which only a name must be there."""

    names: tuple[str, ...]
    values: tuple[Any, ...]
    kind: type


def keys(words: str) -> Iterator[Key]:
    """The keys of a text, which blanks separate."""
    for word in words.split():
        stated, _, said = word.partition("=")
        names, _, kind = stated.partition(":")
        values = tuple(map(_value, said.split("|"))) if said else ()
        yield Key(tuple(names.split("/")), values, KINDS[kind] if kind else type(values[0]) if values else str)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def table(
    sets: Mapping[str, str], no_effect: Mapping[str, str], refused: Mapping[str, str], **own: Rule
) -> dict[str, Rule]:
    """The rules of keys.

    Args:
        sets: keys, and the option of ours that each sets.
        no_effect: reasons and the keys that they hold for, with their usual values. `refused`: with the allowed ones.
        own: keys with rules of their own.
    """
    rules: dict[str, Rule] = {key: Sets(setting) for key, setting in sets.items()}
    for reason, words in no_effect.items():
        rules |= {key.names[0]: NoEffect(key.kind, reason, key.values) for key in keys(words)}
    for reason, words in refused.items():
        rules |= {key.names[0]: Only(key.values, reason) for key in keys(words)}
    return rules | own


def spelled(name: str) -> str:
    """An option as users write it; a name with dashes before it is what they write."""
    return name if name.startswith("-") else f"--{name.replace('_', '-')}"


def described(rule: Rule, mark: str = "") -> str:
    """Effect of a key, in words; `mark` stands around options and values."""
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
    """A value of one of our options and where it was said."""

    value: Any
    origin: str


@dataclass
class Translation:
    """Translation of a configuration: values by the names of our options, and keys without effect, with the reason."""

    settings: dict[str, Given] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def set(self, setting: str, value: Any, origin: str) -> None:
        """Notes a value; raises `ConfigError` where another place says something else.

        Objects with different keys are parts of one.
        """
        known = self.settings.setdefault(setting, Given(value, origin))
        if isinstance(value, dict) and isinstance(known.value, dict) and not value.keys() & known.value.keys():
            self.settings[setting] = Given({**known.value, **value}, f"{known.origin} and {origin}")
            return
        if known.value is not value and known.value != value:  # NaN is not even itself
            raise ConfigError(
                f"{known.origin} and {origin} both set {setting}, to {known.value!r} and {value!r}; give one of them"
            )

    def add(self, other: Translation) -> None:
        """Join what another place of the same rank says; raise `ConfigError` where the two contradict each other."""
        for setting, given in other.settings.items():
            self.set(setting, *given)
        self.notes += other.notes


def translate(
    stated: Mapping[str, Any], table: Table, place: str, elsewhere: Mapping[str, str] | None = None
) -> Translation:
    """Apply a table to keys and values.

    Args:
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
    """Apply the rule of one key to a value; raises `ConfigError` if the value is not possible here."""
    result = Translation()
    if isinstance(rule, Group):
        said = rule.present
        if value is None:
            if rule.absent is None:
                raise ConfigError(empty_group(origin))
            said, value = rule.absent, {}
        elif not isinstance(value, Mapping):
            raise ConfigError(f"{origin} = {value!r}: expected {WORDS[dict]}")
        if said is not None:
            result.set(*said, origin)
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
    """Words for a group without keys; `lost` are keys of such a group that were found beside it."""
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
    """Equal and of the same type, since True == 1."""
    return any(type(value) is type(one) and value == one for one in values)
