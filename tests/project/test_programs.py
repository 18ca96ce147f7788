"""Programs outside of the package name what is there: modules of the package, what they hold, and files."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "conformance", "examples", "scripts", "tests")
PACKAGE = "sametoken"
# The only reason for which a module of ours may not be importable here: it needs what runs its kernels.
OPTIONAL = {"triton"}

# Programs and what runs them, in which paths of files are read too.
RUNNERS = ("Makefile", "pyproject.toml", "setup.py", "scripts/*.sh", ".github/workflows/*.yml")
PATH = re.compile(r"(?<![\w./*-])[\w*.-]+(?:/[\w*.-]+)+\.(?:py|sh)(?!\w)")


def programs() -> list[Path]:
    return sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))


def ours(name: str) -> bool:
    return name == PACKAGE or name.startswith(f"{PACKAGE}.")


@cache
def source_of(name: str) -> Path | None:
    place = ROOT / "src" / name.replace(".", "/")
    return next((file for file in (place.with_suffix(".py"), place / "__init__.py") if file.exists()), None)


@cache
def defined(name: str) -> set[str]:
    """What a module of ours holds; read from its source where it needs what is not installed."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        file = source_of(name)
        if file is None or error.name not in OPTIONAL:
            raise
        return set(bound(ast.parse(file.read_text(encoding="utf-8"))))
    return {*dir(module), *getattr(module, "__all__", ())}


def bound(tree: ast.Module) -> Iterator[str]:
    """Names that a module's own statements bind."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from (alias.asname or alias.name.partition(".")[0] for alias in names)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Assign() | ast.AnnAssign():
                yield from (part.id for part in ast.walk(node) if isinstance(part, ast.Name))


def problems(tree: ast.Module) -> Iterator[str]:
    """Imports from the package that fail, and attributes of its modules that are not there."""
    modules: dict[str, str] = {}  # local name to module
    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None and ours(node.module):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if source_of(inner) is not None:
                    modules[alias.asname or alias.name] = inner
                elif source_of(node.module) is None or alias.name not in defined(node.module):
                    yield f"line {node.lineno}: {node.module} has no {alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if ours(alias.name) and source_of(alias.name) is None:
                    yield f"line {node.lineno}: there is no {alias.name}"
                elif ours(alias.name) and alias.asname:
                    modules[alias.asname] = alias.name
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    stored |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    for node in nodes:
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute, ctx=ast.Load()) if (
                name in modules and name not in stored
            ):
                inner = f"{modules[name]}.{attribute}"
                if attribute not in defined(modules[name]) and source_of(inner) is None:
                    yield f"line {node.lineno}: {modules[name]} has no {attribute}"


def test_programs_import_what_the_package_has() -> None:
    found = programs()
    assert {file.relative_to(ROOT).parts[0] for file in found} == set(FOLDERS)
    assert [
        f"{file.relative_to(ROOT)}, {problem}"
        for file in found
        for problem in problems(ast.parse(file.read_text(encoding="utf-8")))
    ] == []


def missing(file: Path, text: str) -> list[str]:
    """Paths of programs and tests, with or without `*`, that lead to no file."""
    places = (ROOT, ROOT / "tests", ROOT / "src" / PACKAGE, file.parent)
    return [path for path in PATH.findall(text) if not any(any(place.glob(path)) for place in places)]


def test_programs_name_files_that_are_there() -> None:
    files = [file for pattern in RUNNERS for file in sorted(ROOT.glob(pattern))]
    assert {file.name for file in files} >= {"Makefile", "gpu_check.sh", "release.yml"}
    files += [file for file in programs() if not file.name.startswith("test_")]
    found = {str(file.relative_to(ROOT)): missing(file, file.read_text(encoding="utf-8")) for file in files}
    assert {name: paths for name, paths in found.items() if paths} == {}


def test_a_path_to_no_file_is_found() -> None:
    text = "pytest tests/project/test_programs.py tests/kernels/test_triton_*.py tests/test_gone_*.py scripts/gone.sh"
    assert missing(ROOT / "Makefile", text) == ["tests/test_gone_*.py", "scripts/gone.sh"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("from sametoken import LLM, files\nfiles.lock", None),
        ("import sametoken.engine.llm as llm\nllm.LLM", None),
        ("from sametoken.kernels.triton import draw\ndraw._race", None),
        ("from sametoken import LLMs", "sametoken has no LLMs"),
        ("def later():\n    from sametoken.engine.llm import LLMs", "sametoken.engine.llm has no LLMs"),
        ("from sametoken.engine.gone import LLM", "sametoken.engine.gone has no LLM"),
        ("import sametoken.engine.gone", "there is no sametoken.engine.gone"),
        ("from sametoken.engine import llm\nllm.gone()", "sametoken.engine.llm has no gone"),
        ("from sametoken.kernels.triton import draw\ndraw._gone", "sametoken.kernels.triton.draw has no _gone"),
    ],
)
def test_what_is_gone_is_found(text: str, problem: str | None) -> None:
    found = [each.partition(": ")[2] for each in problems(ast.parse(text))]
    assert found == ([] if problem is None else [problem])
