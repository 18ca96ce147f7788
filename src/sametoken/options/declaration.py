"""Declaration of options: a class of typed fields, each with its default and a text below it.

The command line, request bodies, the OpenAPI document and the tables of the documentation are made from `declared`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, Self, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from sametoken.errors import ConfigError, found_wrong, unknown_name
from sametoken.options.texts import texts_of_fields

SAME: Any = object()  # mark of a field in request bodies that has the type of its declaration

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
# The command line passes a list, or None if the option was not given.
Names = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda given: tuple(given or ()) if given is None or isinstance(given, list) else given),
]


@dataclass(frozen=True, slots=True)
class Shown:
    """Presentation of an option in help and documents, as an annotation of its field; replaces that of its type."""

    spellings: tuple[str, ...] = ()
    """further spellings on the command line, with their dashes."""
    command_line: bool = True
    """True if commands have the option; False for objects, which are awkward on a command line."""
    http: Any = SAME
    """type of the field in request bodies; None if they have no such field."""
    recommended: bool = False
    """a model's generation_config.json may set it."""
    words: str = ""
    """permitted values in words, for error messages; "" derives them from the type."""
    bare: str = ""
    """key of an option in JSON that a text without braces sets; "" for none."""


class Elsewhere:
    """Names of an option in other tools, as an annotation of its field: the tool, a space, and the key with its groups.

    Example: "vllm ngram.prompt_lookup_max"; a slash separates the spellings of one key.
    """

    def __init__(self, *names: str) -> None:
        self.names = names


class Declared(NamedTuple):
    """One option of a declaration."""

    name: str
    field: FieldInfo
    help: str
    shown: Shown
    elsewhere: tuple[str, ...]

    @property
    def hint(self) -> Any:
        """Type of the option with its limits."""
        return (
            Annotated[(self.field.annotation, *self.field.metadata)] if self.field.metadata else self.field.annotation
        )


def declared(owner: type) -> dict[str, Declared]:
    """Options of a declaration by name, in the order of its fields.

    Args:
        owner: a subclass of `Settings`, or a pydantic dataclass.
    """
    fields: dict[str, FieldInfo] = owner.__pydantic_fields__  # type: ignore[attr-defined]
    texts = texts_of_fields(owner)
    return {name: _declared(name, field, texts.get(name, "")) for name, field in fields.items()}


def title(owner: type) -> str:
    """Title of a declaration: the first line of its docstring, without the full stop."""
    return (owner.__doc__ or "").partition("\n")[0].rstrip(".")


def _declared(name: str, field: FieldInfo, text: str) -> Declared:
    shown = next((each for each in field.metadata if isinstance(each, Shown)), Shown())
    elsewhere = next((each.names for each in field.metadata if isinstance(each, Elsewhere)), ())
    return Declared(name, field, " ".join((field.description or text).split()), shown, elsewhere)


def members(hint: Any) -> list[Any]:
    """Member types of a union, without annotations; a list of one type if `hint` is no union."""
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) in (Union, UnionType):
        return [each for member in get_args(hint) for each in members(member)]
    return [hint]


def limits(hint: Any) -> dict[str, Any]:
    """Numeric bounds of a type: "ge", "gt", "le" and "lt", each with its value."""
    found = {name: getattr(hint, name) for name in ("ge", "gt", "le", "lt") if getattr(hint, name, None) is not None}
    for part in hint.metadata if isinstance(hint, FieldInfo) else get_args(hint):
        found |= limits(part)
    return found


def expected(option: Declared) -> str:
    """Description of an option's permitted values, for error messages."""
    kinds, bounds = members(option.hint), limits(option.hint)
    low, high = bounds.get("ge", bounds.get("gt")), bounds.get("le", bounds.get("lt"))
    if option.shown.words:
        words = option.shown.words
    elif bool in kinds:
        words = "true or false"
    elif int in kinds:
        words = "an integer" if low is None else f"an integer >= {low}"
    elif float in kinds and high is not None:
        words = f"a number in {'[' if 'ge' in bounds else '('}{low}, {high}]"
    elif float in kinds:
        words = f"a finite number {'>=' if 'ge' in bounds else '>'} {low}"
    else:
        words = "text" if str in kinds else f"a {kinds[0].__name__}"
    return f"{words} or None" if NoneType in kinds else words


class Settings(BaseModel):
    """Base class of every group of settings: immutable; an unknown key or a wrong value raises `ConfigError`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def __init__(self, **values: Any) -> None:
        unknown = [key for key in values if key not in type(self).model_fields]
        if unknown:
            raise ConfigError(unknown_name(f"{type(self).__name__} key", unknown[0], type(self).model_fields))
        try:
            super().__init__(**values)
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(str(part) for part in problem["loc"])
            field, place = type(self).__name__, ""
            if where:  # otherwise several keys contradict each other, and the message names them
                field, place = f"{field}.{where}", f" = {problem['input']!r}"
            raise ConfigError(found_wrong(problem), field=field, place=place) from error

    @classmethod
    def of(cls, given: Self | Mapping[str, Any] | None) -> Self:
        """Settings from an instance, from a mapping of keys to values, or from None (the defaults)."""
        if isinstance(given, cls):
            return given
        if given is not None and not isinstance(given, Mapping):
            raise ConfigError(f"got {type(given).__name__} {given!r}, expected {cls.__name__} or a mapping of its keys")
        return cls(**(given or {}))
