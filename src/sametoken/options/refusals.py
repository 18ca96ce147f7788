"""Refusal of a value by a dataclass of options, with the name of the field, the value and the permitted values."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from pydantic import ConfigDict, ValidationError

from sametoken.errors import RequestError, SametokenError, unknown_name
from sametoken.options.declaration import declared, expected

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
T = TypeVar("T")


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
