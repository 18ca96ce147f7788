"""Options of the commands, taken from the settings classes: their names, types, defaults and documentation.

One source, so an option cannot drift from the field that it sets, nor be accepted without one.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from sametoken.config import EngineConfig, KVCacheConfig, Settings, SpeculativeConfig
from sametoken.errors import ConfigError
from sametoken.notes import attribute_notes
from sametoken.speculation.params import RECOMMENDED, SamplingParams

CACHE = "kv_cache_"  # before the keys of the page pool, whose `max_tokens` is not the request's
Values = Mapping[str, Any]  # what the user chose, by option name
ALIASES = {
    "data": ("--data_path", "--data-path"),
    "stop_token_ids": ("--stop-token-id",),
    "bad_words": ("--bad-word",),
    "kv_cache_max_tokens": ("--kv-cache-tokens",),
}


class Chosen(dict[str, Any]):
    """Values of all options.

    Attributes:
        given: the names of those that the user gave, at their default or not.
    """

    def __init__(self, values: Values, given: Iterable[str]) -> None:
        super().__init__(values)
        self.given = frozenset(given)


class Option(NamedTuple):
    """One option.

    Attributes:
        name: as a Python name; spelled with dashes or underscores on the command line.
        type: bool, int, float, str, list[int] or list[str] (repeatable).
        default: what it is when not given.
        help: says the unit and what None means.
        metavar: what the help shows as its value; None lets the type speak.
        aliases: further spellings, as they are written.
        words: its value goes on, word by word, up to the next option.
    """

    name: str
    type: Any
    default: Any
    help: str
    metavar: str | None = None
    aliases: tuple[str, ...] = ()
    words: bool = False

    @property
    def spellings(self) -> tuple[str, ...]:
        """What a user may write, the documented spelling first."""
        dashed, plain = self.name.replace("_", "-"), self.name
        if self.type is bool:
            pairs = (f"--{dashed}/--no-{dashed}", f"--{plain}/--no_{plain}")
            return pairs if dashed != plain else pairs[:1]
        return tuple(dict.fromkeys((f"--{dashed}", f"--{plain}", *ALIASES.get(self.name, ()), *self.aliases)))


class Argument(NamedTuple):
    """What a command takes without a name, where that is not a model.

    Attributes:
        type: str, or list[str] for one or more.
        help: says what it is. `metavar`: what the help shows as its value.
        optional: it may be left out, which is None.
    """

    type: Any
    help: str
    metavar: str
    optional: bool = False


def sampling_options(*names: str) -> tuple[Option, ...]:
    """Options for fields of `SamplingParams`, all of them unless named; how to draft is the engine's choice here.

    Those that a model may recommend are None unless given.
    """
    hints, notes = get_type_hints(SamplingParams), attribute_notes(SamplingParams)

    def option(name: str, default: Any) -> Option:
        note = notes.get(name, "")
        if name not in RECOMMENDED:
            return _option(name, hints[name], default, note)
        return _option(name, hints[name], None, f"{note.rstrip('.')}; None is the model's own, else {default:g}.")

    return tuple(
        option(field.name, field.default)
        for field in fields(SamplingParams)
        if field.name in names or not names
        if field.name not in ("speculative", "structured_outputs")  # objects, which a command line cannot say well
    )


def settings_options(owner: type[Settings], prefix: str = "") -> tuple[Option, ...]:
    """One option per field of a group of settings, `prefix` before its name."""
    hints, notes = get_type_hints(owner), attribute_notes(owner)
    return tuple(
        _option(prefix + name, hints[name], field.default, notes.get(name, ""))
        for name, field in owner.model_fields.items()
    )


def engine_options() -> tuple[Option, ...]:
    """Which models to load, how to draft, and the engine around them."""
    return (
        Option("draft", str, None, "draft model or head: directory, run or Hub id; None is the embedded target's own."),
        Option("revision", str, None, "branch, tag or commit of MODEL on the Hub; None is its main branch."),
        Option("draft_revision", str, None, "the same for the draft."),
        *settings_options(SpeculativeConfig),
        *settings_options(EngineConfig),
        *settings_options(KVCacheConfig, CACHE),
        Option("threads", int, None, "threads that compute; None is one per core."),
    )


def sampling_of(values: Values, recommended: Mapping[str, Any] | None = None) -> SamplingParams:
    """The sampling parameters that were chosen, then what the model recommends, then the defaults.

    Raises:
        RequestError: a value is refused.
    """
    known = [field.name for field in fields(SamplingParams) if field.name in values]
    given = {name: values[name] for name in known if values[name] is not None or name not in RECOMMENDED}
    chosen = {**(recommended or {}), **given}
    for name in ("stop", "stop_token_ids", "bad_words"):
        chosen[name] = chosen.get(name) or ()
    chosen["logit_bias"] = _biases(chosen.get("logit_bias"))
    return SamplingParams(**chosen)


def settings_of(owner: type[Settings], values: Values, prefix: str = "") -> dict[str, Any]:
    """Keys and values of a group of settings that are among the options."""
    hints = get_type_hints(owner)
    return {
        name: _table(prefix + name, values[prefix + name]) if _is_table(hints[name]) else values[prefix + name]
        for name in owner.model_fields
        if prefix + name in values
    }


def refuse_given(options: Sequence[Option], values: Values, purpose: str) -> None:
    """Refuses options that were given although nothing would read them.

    Args:
        purpose: what they are for and how to get there, after "is for".

    Raises:
        ConfigError: names the first.
    """
    for option in options:
        if values[option.name] != option.default:
            raise ConfigError(f"{option.spellings[0].partition('/')[0]} is for {purpose}, or leave it out")


def joined_words(arguments: Sequence[str], options: Sequence[Option]) -> list[str]:
    """The arguments with the words of an option that takes several as one."""
    several = {spelling for option in options if option.words for spelling in option.spellings}
    joined: list[str] = []
    going = False  # the option has its first word and may have more
    for place, argument in enumerate(arguments):
        going = going and not argument.startswith("--")
        if going:
            joined[-1] += f" {argument}"
        else:
            joined.append(argument)
            going = place > 0 and arguments[place - 1] in several
    return joined


def _option(name: str, hint: Any, default: Any, note: str) -> Option:
    kind, metavar = _spoken(hint)
    return Option(name, kind, None if get_origin(kind) is list else default, note, metavar)


def _spoken(hint: Any) -> tuple[Any, str | None]:
    """The type that a command line can say for a field's type, and a word for its value."""
    parts = list(_parts(hint))
    if str in parts and len(parts) > 1:  # one string or several
        return list[str], "TEXT"
    (kind,) = parts
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return str, "|".join(inner)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return (list[str], "ID=BIAS") if inner[1] is float else (str, "SIZE:LENGTH,...")
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return list[inner[0]], "ID" if inner[0] is int else "TEXT"  # type: ignore[valid-type]
    return kind, None


def _parts(hint: Any) -> Iterator[Any]:
    """The members of a union without None and without annotations."""
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) in (Union, types.UnionType):
        for member in get_args(hint):
            yield from _parts(member)
    elif hint is not type(None):
        yield hint


def _is_table(hint: Any) -> bool:
    return any(isinstance(kind := get_origin(part), type) and issubclass(kind, Mapping) for part in _parts(hint))


def _table(name: str, given: str | Mapping[int, int] | None) -> dict[int, int] | None:
    """Integers by integers from "1:4,8:2" or from JSON, whose keys are strings; a table stays one."""
    if given is None or isinstance(given, Mapping):
        return None if given is None else dict(given)
    pairs = [part.split(":") for part in re.sub(r'[{}"\s]', "", given).split(",")]
    try:
        table = {int(key): int(value) for key, value in pairs}
    except ValueError:
        table = {}
    if len(table) != len(pairs):
        raise ConfigError(f"--{name.replace('_', '-')} {given!r}: expected for example 4:4,16:2 (sizes must differ)")
    return table


def _biases(given: Sequence[str] | None) -> dict[int, float] | None:
    biases = {}
    for text in given or ():
        token, _, bias = text.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise ConfigError(f"--logit-bias {text!r}: expected ID=BIAS, for example 42=-1.5") from None
    return biases or None
