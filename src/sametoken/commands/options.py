"""Options of the commands, made from the settings classes with their names, types, defaults and documentation.

With this single source, an option always agrees with the field that it sets, and none exists without a field.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin

from sametoken.errors import ConfigError
from sametoken.options.declaration import Declared, Settings, declared, limits, members, title
from sametoken.options.engine import EngineConfig, KVCacheConfig, ModelSettings
from sametoken.options.sampling import RECOMMENDED, SamplingParams
from sametoken.options.serving import CACHE, GROUPS
from sametoken.options.speculation import SpeculativeConfig

MOST_NUMBERS = 64  # numbers of one option, at most
# Equivalent names, accepted by every command, ours first: for the tokens of an output (names in vLLM, AIPerf and
# transformers), and for a file of conversations.
SYNONYMS = (("max_tokens", "output_len", "osl", "max_new_tokens"), ("data", "prompts", "data_path", "input_path"))
PREFIXES = {owner.__name__: prefix for owner, prefix in GROUPS}  # prefixes of names of options, by class of settings
Values = Mapping[str, Any]  # values of options, by name


class Chosen(dict[str, Any]):
    """Values of all options.

    Attributes:
        given: names of the options that the user gave, even with their default values.
    """

    def __init__(self, values: Values, given: Iterable[str]) -> None:
        super().__init__(values)
        self.given = frozenset(given)


class Option(NamedTuple):
    """One option.

    Attributes:
        name: name as in Python; on the command line it is written with dashes or underscores.
        type: bool, int, float, str, list[int] or list[str] (repeatable), or a tuple of numbers, which are separated by
            commas; numbers may have limits.
        default: value of the option if it is not given.
        help: description, with the unit and the meaning of None.
        metavar: placeholder of the value in the help; None derives it from the type.
        aliases: further spellings, with their dashes.
        words: True if the value consists of all words up to the next option.
        group: title of the option's panel in the help; "" for the command's own panel.
        hidden: True if the help does not show the option.
        alone: value of the option if no value follows it.
    """

    name: str
    type: Any
    default: Any
    help: str
    metavar: str | None = None
    aliases: tuple[str, ...] = ()
    words: bool = False
    group: str = ""
    hidden: bool = False
    alone: str | None = None

    @property
    def kind(self) -> Any:
        """Type of the option for the parser, without limits."""
        return str if get_origin(self.type) is tuple else members(self.type)[0]

    @property
    def spellings(self) -> tuple[str, ...]:
        """Accepted spellings of the option, the documented one first."""
        dashed, plain = self.name.replace("_", "-"), self.name
        if self.kind is bool:
            pairs = (f"--{dashed}/--no-{dashed}", f"--{plain}/--no_{plain}")
            return (*(pairs if dashed != plain else pairs[:1]), *self.aliases)
        own = {self.name, *(each.lstrip("-") for each in self.aliases)}
        others = [each for names in SYNONYMS if own & {*names} for each in names]
        also = (f"--{each}" for name in others for each in (name.replace("_", "-"), name))
        return tuple(dict.fromkeys((f"--{dashed}", f"--{plain}", *self.aliases, *also)))

    @property
    def parsed(self) -> tuple[str, ...]:
        """Spellings for the parser; `variants` maps the others to these."""
        return tuple(each for each in self.spellings if each == self.spellings[0] or not each.startswith("--"))


THREADS = Option(
    "threads", int, None, "number of threads that compute; without it: one per core.", group=title(EngineConfig)
)
CPUS = Option(
    "cpus", str, None,
    "CPUs to compute on, as taskset writes them, for example 0-15 or 0,2,4: as many threads, unless --threads is "
    "given. Replicas divide the CPUs. Without it: all that the process may use.",
    group=title(EngineConfig),
)  # fmt: skip


AS_JSON = Option("json", bool, False, "print one JSON object instead of text.")


def several(owner: type, name: str) -> Any:
    """Type of an option with several values of a setting, each within the limits of the setting."""
    return tuple[declared(owner)[name].hint, ...]  # type: ignore[misc]


class Argument(NamedTuple):
    """Positional argument of a command, if it is not a model.

    Attributes:
        type: str, or list[str] for one or more values.
        help: description of the argument.
        metavar: placeholder of the value in the help.
        optional: True if the argument may be left out; its value is None then.
    """

    type: Any
    help: str
    metavar: str
    optional: bool = False


def variants(options: Iterable[Option]) -> dict[str, str]:
    """Documented name of an option by each further spelling, both without their two dashes."""
    found: dict[str, str] = {}
    for option in options:
        first, *others = option.spellings
        for other in (each for each in others if each.startswith("--")):
            pairs = zip(other.split("/"), first.split("/"), strict=False)
            found.update((spelling[2:], documented[2:]) for spelling, documented in pairs)
    return found


def titled(title: str, *options: Option) -> tuple[Option, ...]:
    """Options with the title of their common panel in the help."""
    return tuple(option._replace(group=title) for option in options)


def sampling_options(*names: str, owner: type = SamplingParams) -> tuple[Option, ...]:
    """Options for fields of `SamplingParams`: the named ones, or all that commands have.

    Options that a model may recommend have the default None.
    """
    return tuple(
        _recommended(owner, option) if option.shown.recommended else _option(owner, option)
        for option in declared(owner).values()
        if option.shown.command_line and (option.name in names or not names)
    )


def settings_options(owner: type[Settings], prefix: str = "") -> tuple[Option, ...]:
    """Options for the fields of a group of settings, with `prefix` before their names."""
    return tuple(_option(owner, option, prefix) for option in declared(owner).values())


def engine_options() -> tuple[Option, ...]:
    """Models to load, drafting, and the engine around them."""
    return (
        *settings_options(ModelSettings),
        *settings_options(SpeculativeConfig),
        *settings_options(EngineConfig),
        *settings_options(KVCacheConfig, CACHE),
        THREADS,
        CPUS,
    )


def sampling_of(values: Values, recommended: Mapping[str, Any] | None = None) -> SamplingParams:
    """Sampling parameters from the options, then from the model's recommendations, then from the defaults.

    Raises:
        RequestError: a value is refused.
    """
    given = {
        name: values[name]
        for name in declared(SamplingParams).keys() & values
        if values[name] is not None or name not in RECOMMENDED
    }
    chosen = {**(recommended or {}), **given}
    for name in ("stop", "stop_token_ids", "bad_words"):
        chosen[name] = chosen.get(name) or ()
    chosen["logit_bias"] = _biases(chosen.get("logit_bias"))
    return SamplingParams(**chosen)


def settings_of(owner: type[Settings], values: Values, prefix: str = "") -> dict[str, Any]:
    """Keys and values of a group of settings, for the keys that are options."""
    return {
        name: _tables(option)(prefix + name, values[prefix + name]) if _is_table(option) else values[prefix + name]
        for name, option in declared(owner).items()
        if prefix + name in values
    }


def refuse_beyond(options: Iterable[Option], values: Values) -> None:
    """Refuse numbers outside the limits of their options; the classes of settings check their own values.

    Raises:
        ConfigError: a number is outside its limits; the message names the first option.
    """
    for option in options:
        value, bounds = values[option.name], limits(option.type)
        if not bounds or value is None:
            continue
        if get_origin(option.type) is tuple:
            numbers(option, value)
            continue
        given = f"{option.spellings[0]} {value}: expected"
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{given} a finite number")
        if "ge" in bounds and value < bounds["ge"]:
            raise ConfigError(f"{given} at least {bounds['ge']}")
        if "gt" in bounds and value <= bounds["gt"]:
            raise ConfigError(f"{given} more than {bounds['gt']}")
        if value > (most := bounds.get("le", sys.maxsize)):
            raise ConfigError(f"{given} at most {most}")


def numbers(option: Option, text: str) -> list[Any]:
    """Distinct numbers of an option that takes several, separated by commas, in their order.

    Raises:
        ConfigError: one is no number or outside the limits of the option, or there are too many.
    """
    (kind,), bounds = members(get_args(option.type)[0]), limits(option.type)
    low, high = bounds["ge"], bounds.get("le", math.inf)
    try:
        found = list(dict.fromkeys(kind(part) for part in text.split(",")))
    except ValueError:
        found = []
    if not found or not all(low <= value <= high and value < math.inf for value in found) or len(found) > MOST_NUMBERS:
        what, example = ("whole numbers", "1,2,4") if kind is int else ("numbers", "0,0.7,1.0")
        what += f" >= {low:g}" + ("" if high == math.inf else f" and <= {high}")
        raise ConfigError(f"{option.spellings[0]} {text!r}: expected {what} separated by commas, for example {example}")
    return found


def spelled_as_option(error: ConfigError, options: Iterable[Option]) -> ConfigError:
    """Error about a setting, with the name of the option in place of the setting's name."""
    group, _, name = error.field.partition(".")
    if group in PREFIXES and not name:
        return error.about("")  # the error is about several settings, which the message names
    spellings = {option.name: option.spellings[0].partition("/")[0] for option in options}
    return error.about(spellings.get(PREFIXES.get(group, "") + name, error.field))


def given_words(options: Iterable[Option], values: Chosen, without: Iterable[str] = ()) -> Iterator[str]:
    """Words of a command line for the given options, except those with the names `without`."""
    for option in options:
        if option.name not in values.given or option.name in without:
            continue
        name, value = option.name.replace("_", "-"), values[option.name]
        if isinstance(value, bool):
            yield f"--{name}" if value else f"--no-{name}"
            continue
        for each in value if isinstance(value, list | tuple) else (value,):
            yield from (f"--{name}", str(each))


def refuse_given(options: Sequence[Option], values: Values, purpose: str) -> None:
    """Refuse given options that would have no effect.

    Args:
        purpose: use of the options and how to select it, as the continuation of "is for".

    Raises:
        ConfigError: one of the options was given; the message names the first.
    """
    for option in options:
        if values[option.name] != option.default:
            raise ConfigError(f"{option.spellings[0].partition('/')[0]} is for {purpose}, or leave it out")


def joined_words(arguments: Sequence[str], options: Sequence[Option]) -> list[str]:
    """Arguments in which the words of one option (`Option.words`) are joined, and omitted values (`alone`) added."""
    several = {spelling for option in options if option.words for spelling in option.spellings}
    alone = {spelling: option.alone for option in options if option.alone for spelling in option.spellings}
    joined: list[str] = []
    going = False  # True if further words belong to the option
    for place, argument in enumerate(arguments):
        if joined and joined[-1] in alone and argument.startswith("-"):
            joined.append(alone[joined[-1]])
        going = going and not argument.startswith("--")
        if going:
            joined[-1] += f" {argument}"
        else:
            joined.append(argument)
            going = place > 0 and arguments[place - 1] in several
    return [*joined, alone[joined[-1]]] if joined and joined[-1] in alone else joined


def _option(owner: type, option: Declared, prefix: str = "") -> Option:
    kind, metavar = _option_type(option.hint)
    default = None if get_origin(kind) is list else option.field.default
    return Option(prefix + option.name, kind, default, option.help, metavar, option.shown.spellings, group=title(owner))


def _recommended(owner: type, option: Declared) -> Option:
    note = f"{option.help.rstrip('.')}; without it: the model's own, else {option.field.default:g}."
    return _option(owner, option)._replace(default=None, help=note)


def _option_type(hint: Any) -> tuple[Any, str | None]:
    """Type of an option for the type of a field, and the placeholder of its value."""
    kinds = [kind for kind in members(hint) if kind is not NoneType]
    if str in kinds and len(kinds) > 1:  # one string or several
        return list[str], "TEXT"
    (kind,) = kinds
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return type(inner[0]), "|".join(map(str, inner))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if inner[0] is str:
            return str, "JSON"
        return (list[str], "ID=BIAS") if inner[1] is float else (str, "SIZE:LENGTH,...")
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return list[inner[0]], "ID" if inner[0] is int else "TEXT"  # type: ignore[valid-type]
    return kind, None


def _is_table(option: Declared) -> bool:
    return any(
        isinstance(kind := get_origin(each), type) and issubclass(kind, Mapping) for each in members(option.hint)
    )


def _tables(option: Declared) -> Callable[[str, Any], dict[Any, Any] | None]:
    """Parser of the text of an option whose value is a mapping."""
    (kind,) = (each for each in members(option.hint) if get_origin(each) is not None)
    return partial(_object, option.shown.bare) if get_args(kind)[0] is str else _table


def _object(bare: str, name: str, given: str | Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Mapping from a JSON object, or from a text without braces as the value of `bare`; a mapping is copied."""
    if given is None or isinstance(given, Mapping):
        return None if given is None else dict(given)
    if bare and not given.lstrip().startswith("{"):
        return {bare: given.strip()}
    try:
        found = json.loads(given)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"--{name.replace('_', '-')} {given!r}: expected a JSON object")
    return found


def _table(name: str, given: str | Mapping[int, int] | None) -> dict[int, int] | None:
    """Mapping of integers from "1:4,8:2", or from JSON, whose keys are strings; a mapping is copied."""
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
