"""Texts that stand below the fields of a class, read from its source when somebody asks for them.

Pydantic can read them too (`use_attribute_docstrings`), but does so while the class is made and walks the whole stack
for each: 0.25 s of the start of a server, which shows them to nobody.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise


def texts_of_fields(owner: type) -> Mapping[str, str]:
    """Texts below the fields of a class and of its bases, by field; nothing where there is no source."""
    found: dict[str, str] = {}
    for part in reversed(owner.__mro__):
        if part.__module__.partition(".")[0] == "pydantic":  # whose own fields are no options
            continue
        found |= _texts(part.__module__).get(part.__qualname__, {})
    return {name: text for name, text in found.items() if text}


@cache
def _texts(module: str) -> Mapping[str, Mapping[str, str]]:
    """The texts of all classes of a module by qualified name; classes in functions are left out."""
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
    """Each field of a class with the text below it, "" if there is none, which a text of a base does not replace."""
    for field, below in pairwise([*body, ast.Pass()]):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            match below:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield field.target.id, inspect.cleandoc(text)
                case _:
                    yield field.target.id, ""
