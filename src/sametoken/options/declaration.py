"""Declaration of options: a class of typed fields, each with its default and a text below it; refusal of a value.

The command line, request bodies, the OpenAPI document and the tables of the documentation are made from `declared`.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, wraps
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, Self, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from sametoken.errors import ConfigError, RequestError, SametokenError, found_wrong, unknown_name

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
T = TypeVar("T")
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


def texts_of_fields(owner: type) -> Mapping[str, str]:
    """Texts below the fields of a class and of its bases, by field; empty if there is no source."""
    found: dict[str, str] = {}
    for part in reversed(owner.__mro__):
        if part.__module__.partition(".")[0] == "pydantic":  # fields of pydantic's classes are no options
            continue
        found |= _texts(part.__module__).get(part.__qualname__, {})
    return {name: text for name, text in found.items() if text}


@cache
def _texts(module: str) -> Mapping[str, Mapping[str, str]]:
    """Texts of all classes of a module by qualified name; classes within functions are left out."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError, KeyError):  # built in, or without source
        return {}
    return {name: dict(_below_fields(node.body)) for name, node in _classes(tree.body, "")}


def _classes(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.ClassDef]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield prefix + node.name, node
            yield from _classes(node.body, f"{prefix}{node.name}.")


def _below_fields(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    """Fields of a class, each with the text below it.

    A field without a text has "", so that a text from a base class does not replace it.
    """
    for field, below in pairwise([*body, ast.Pass()]):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            match below:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield field.target.id, inspect.cleandoc(text)
                case _:
                    yield field.target.id, ""


def refusing(field: str = "") -> Callable[[type[T]], type[T]]:
    """Decorate a pydantic dataclass: a wrong value raises `RequestError` with the permitted values of its field.

    Args:
        field: name of the request's field that contains the object; "" if the object is the request itself.
    """

    def wrap(owner: type[T]) -> type[T]:
        checked = owner.__init__

        @wraps(checked)
        def init(self: T, *values: Any, **named: Any) -> None:
            try:
                checked(self, *values, **named)
            except ValidationError as error:
                raise _refused(owner, field, error) from None

        owner.__init__ = init  # type: ignore[assignment, method-assign]
        return owner

    return wrap


def _refused(owner: type, field: str, error: ValidationError) -> Exception:
    problem = error.errors()[0]
    raised = problem.get("ctx", {}).get("error")
    if isinstance(raised, SametokenError):
        return raised
    known = declared(owner)
    name = str(problem["loc"][0]) if problem["loc"] else ""
    if name not in known:
        return TypeError(f"{owner.__name__}: {unknown_name('argument', name, known)}")
    return refusal(field or name, problem["input"], expected(known[name]), f".{name}" if field else "")


def refusal(field: str, got: object, expected: str, place: str = "") -> RequestError:
    advice = "change it or leave it out for the default"
    return RequestError(f"got {got!r}, expected {expected}", field=field, place=place, advice=advice)
