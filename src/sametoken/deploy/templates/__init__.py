"""Templates of the commands, scripts and manifests of a deployment, and their rendering.

A line with a value that is None is left out. Values are quoted as words of a shell or as scalars of YAML; `| safe`
inserts text unquoted. Comments of a template are enclosed in <# and #>.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2
import yaml
from markupsafe import Markup

LEFT_OUT = "\0"  # rendering of None


def render(name: str, values: Mapping[str, Any]) -> str:
    """Text of the template `name`, which ends in .sh or .yml."""
    return complete_lines(_environment(name.endswith(".yml")).get_template(name).render(values))


def complete_lines(text: str) -> str:
    """Text without the lines that contain `LEFT_OUT`."""
    return re.sub(rf"(?m)^.*{LEFT_OUT}.*\n", "", text)


@cache
def _environment(in_yaml: bool) -> jinja2.Environment:
    """Environment that quotes values for YAML or for a shell."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: (files(__name__) / name).read_text(encoding="utf-8")),
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined,
        comment_start_string="<#", comment_end_string="#>",  # {# is a length in bash
        finalize=_in_yaml if in_yaml else _in_shell,
    )  # fmt: skip
    environment.filters |= {"in_json": in_json, "named": named, "lines": lambda words: Markup(lines(words))}
    return environment


def _in_shell(value: Any) -> str:
    if value is None or value == ():
        return LEFT_OUT
    return value if isinstance(value, Markup) else shlex.join([value] if isinstance(value, str) else _words(value))


def _words(value: Any) -> list[str]:
    return [str(each) for each in (value if isinstance(value, list | tuple) else (value,))]


def _in_yaml(value: Any) -> str:
    """YAML scalar on one line; markup unchanged."""
    if value is None or isinstance(value, Markup):
        return LEFT_OUT if value is None else value
    style = '"' if "\n" in str(value) else None
    text: str = yaml.safe_dump(value, width=float("inf"), default_style=style)
    return text.removesuffix("\n").removesuffix("\n...")


def in_json(value: Mapping[str, Any]) -> str:
    """JSON object without the keys whose value is None."""
    return json.dumps({key: each for key, each in value.items() if each is not None})


def named(value: Any, names: Mapping[Any, str], other: str | None = None) -> Any:
    """Name of a value in `names`; `other`, or else the value itself, if it has none."""
    return None if value is None else names.get(value, other or value)


def lines(words: Iterable[str]) -> str:
    """Shell command with one option per line."""
    found: list[list[str]] = [[]]
    for word in words:
        if word.startswith("--"):
            found.append([])
        found[-1].append(shlex.quote(word))
    return " \\\n    ".join(" ".join(line) for line in found)
