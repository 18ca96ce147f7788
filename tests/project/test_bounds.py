"""docs/security.md states the bounds of the source with their numbers."""

from __future__ import annotations

import re
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from sametoken.options.server import ServerConfig
from sametoken.server.threads import SideWork

PAGE = (Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (?P<bound>[^|]+) \| (?P<number>[\d.]+)[^|]* \| `(?P<name>[\w.]+)` \|$", re.MULTILINE)
ROWS = {row["name"]: float(row["number"]) for row in ROW.finditer(PAGE)}


def value_of(name: str) -> Any:
    """The constant, the default of an option or the value of a kind of work that a name stands for."""
    module, _, last = name.rpartition(".")
    outer, _, kind = module.rpartition(".")
    if kind == ServerConfig.__name__:
        return ServerConfig.model_fields[last].default
    if kind[:1].isupper():
        found = getattr(getattr(import_module(f"sametoken.{outer}"), kind), last)
        return found.value if isinstance(found, Enum) else found
    return getattr(import_module(f"sametoken.{module}"), last)


@pytest.mark.parametrize("name", ROWS)
def test_a_number_of_the_page_is_that_of_the_source(name: str) -> None:
    assert ROWS[name] == value_of(name)


def test_every_row_is_compared() -> None:
    stated = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| bound |")]
    assert len(ROWS) == len(stated) > 40
    assert {f"server.threads.SideWork.{work.name}" for work in SideWork} <= ROWS.keys()
    for room in ("body_size", "connection", "tokenizer_trial", "grammar_trial", "templating"):
        places = {name.rpartition(".")[0] for name in ROWS}
        module = next(place for place in places if place.endswith(room))
        source = Path(str(import_module(f"sametoken.{module}").__file__)).read_text(encoding="utf-8")
        bounds = re.findall(r"^((?:MOST_\w+|\w+_SECONDS|TRIAL_\w+)) = ", source, re.MULTILINE)
        assert {f"{module}.{bound}" for bound in bounds} <= ROWS.keys()
