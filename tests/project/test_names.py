"""A public class name has one meaning in all modules, and a constant that others import has one value."""

from __future__ import annotations

import ast
from pathlib import Path

import sametoken

PACKAGE = Path(sametoken.__file__).parent


def public_classes(source: str) -> set[str]:
    """Names of the classes that a module defines, without those that begin with an underscore."""
    names = {node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    return {name for name in names if not name.startswith("_")}


def constants(source: str) -> dict[str, str]:
    """Numbers and texts in capitals that a module assigns, by name."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            found |= {target.id: ast.unparse(node.value) for target in node.targets if isinstance(target, ast.Name)}
    return {name: value for name, value in found.items() if name.isupper() and not name.startswith("_")}


FILES = {str(file.relative_to(PACKAGE)): file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py")}


def test_a_public_class_has_a_name_of_its_own() -> None:
    places: dict[str, list[str]] = {}
    for file, source in FILES.items():
        for name in public_classes(source):
            places.setdefault(name, []).append(file)
    assert places
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_an_imported_constant_has_one_value() -> None:
    """A constant that others import is assigned once, or to the same value wherever it is assigned."""
    imported = {
        alias.name
        for source in FILES.values()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sametoken")
        for alias in node.names
        if alias.name.isupper()
    }
    values: dict[str, dict[str, list[str]]] = {}
    for file, source in FILES.items():
        for name, value in constants(source).items():
            values.setdefault(name, {}).setdefault(value, []).append(file)
    assert {name: found for name, found in values.items() if name in imported and len(found) > 1} == {}


def test_the_scan_sees_what_it_looks_for() -> None:
    assert public_classes("class A: ...\nclass _B: ...\ndef C(): ...") == {"A"}
    assert constants("A = 1\nb = 2\nC = [1]\n_D = 3\nE = 'x'") == {"A": "1", "E": "'x'"}
