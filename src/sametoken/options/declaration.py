"""Declaration of options: a class of typed fields, each with its default and a text below it.

Command line, bodies of requests, the OpenAPI document and the tables of the documentation are views of `declared`.
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

SAME: Any = object()  # the type of the declaration

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
# A command line has lists, and None where nothing was said.
Names = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda given: tuple(given or ()) if given is None or isinstance(given, list) else given),
]


@dataclass(frozen=True, slots=True)
class Shown:
    """Form of an option in help and documents where its type does not give it; in the field's annotation."""

    spellings: tuple[str, ...] = ()
    """further spellings on the command line, with their dashes."""
    command_line: bool = True
    """commands have it; off for objects, which a command line cannot say well."""
    http: Any = SAME
    """the type of the field in bodies of requests; None where they have no such field."""
    recommended: bool = False
    """a model's generation_config.json may set it."""
    words: str = ""
    """what is expected, for errors; without them the type says it."""


class Elsewhere:
    """Names that other tools have for an option, in its annotation: the tool, a space, and the key below its groups."""

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
        """The type with its limits."""
        return (
            Annotated[(self.field.annotation, *self.field.metadata)] if self.field.metadata else self.field.annotation
        )


def declared(owner: type) -> dict[str, Declared]:
    """The options of a declaration by name, in its order: a class of `Settings` or a dataclass of pydantic."""
    fields: dict[str, FieldInfo] = owner.__pydantic_fields__  # type: ignore[attr-defined]
    texts = texts_of_fields(owner)
    return {name: _declared(name, field, texts.get(name, "")) for name, field in fields.items()}


def title(owner: type) -> str:
    """Subject of a declaration: the first line of its text."""
    return (owner.__doc__ or "").partition("\n")[0].rstrip(".")


def _declared(name: str, field: FieldInfo, text: str) -> Declared:
    shown = next((each for each in field.metadata if isinstance(each, Shown)), Shown())
    elsewhere = next((each.names for each in field.metadata if isinstance(each, Elsewhere)), ())
    return Declared(name, field, " ".join((field.description or text).split()), shown, elsewhere)


def members(hint: Any) -> list[Any]:
    """The types of a union, without annotations; one type is a union of itself."""
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) in (Union, UnionType):
        return [each for member in get_args(hint) for each in members(member)]
    return [hint]


def limits(hint: Any) -> dict[str, Any]:
    """Bounds of the numbers of a type: "ge", "gt", "le", "lt" and their values."""
    found = {name: getattr(hint, name) for name in ("ge", "gt", "le", "lt") if getattr(hint, name, None) is not None}
    for part in hint.metadata if isinstance(hint, FieldInfo) else get_args(hint):
        found |= limits(part)
    return found


def expected(option: Declared) -> str:
    """Permitted values of an option, in words."""
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
    """Base of every group of settings: immutable, no unknown keys, `ConfigError` instead of a pydantic error."""

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
            if where:  # otherwise several keys together, which the message names
                field, place = f"{field}.{where}", f" = {problem['input']!r}"
            raise ConfigError(found_wrong(problem), field=field, place=place) from error

    @classmethod
    def of(cls, given: Self | Mapping[str, Any] | None) -> Self:
        """These settings from an instance, a mapping or nothing (the defaults)."""
        if isinstance(given, cls):
            return given
        if given is not None and not isinstance(given, Mapping):
            raise ConfigError(f"got {type(given).__name__} {given!r}, expected {cls.__name__} or a mapping of its keys")
        return cls(**(given or {}))
