"""Texts below the fields of a class, read from its source on first use.

Pydantic can read them too (`use_attribute_docstrings`), but does so while the class is made and walks the whole stack
for each: 0.25 s of the start of a server, which does not use them.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise


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
