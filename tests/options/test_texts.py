"""Texts below fields are those that pydantic reads, and are read from the source of any class."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, ConfigDict

from sametoken.options.declaration import texts_of_fields


class Read(BaseModel):
    """Read by pydantic."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    first: int = 1
    """one line."""
    second: str = ""
    plain: int = 0
    third: str = """no text."""

    class Inner(BaseModel):
        first: int = 2
        """of another class."""


class Below(Read):
    """Takes those of its base."""

    second: str = "a"
    """several lines,
    with blanks before the second.
    """
    first: int = 3


@pytest.mark.parametrize("owner", [Read, Below])
def test_texts_are_those_that_pydantic_reads(owner: type[BaseModel]) -> None:
    known = {name: field.description for name, field in owner.model_fields.items() if field.description}
    assert texts_of_fields(owner) == known != {}


def test_a_class_in_a_class_has_its_own() -> None:
    assert texts_of_fields(Read.Inner) == {"first": "of another class."}


def test_a_class_without_source_has_none() -> None:
    assert texts_of_fields(int) == {}
    assert texts_of_fields(type("Made", (), {"__module__": "nowhere"})) == {}
