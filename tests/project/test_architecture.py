"""Nobody outside a kind's own folder asks which kind a drafter is: by its name, its classes or its version."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from sametoken import kinds

SOURCES = Path(kinds.__file__).parent
# The folders of kinds, by the modules that their records name, and the base that EAGLE's kinds share.
FOLDERS = {kind.drafts.partition(":")[0].rpartition(".")[0] for kind in kinds.kinds() if kind.weights}
OWN = {*FOLDERS, "sametoken.heads.eagle", "sametoken.drafters.kinds"}
# A mode of `sametoken train` that is a common word too.
NAMES = {kind.name for kind in kinds.kinds()} | set(kinds.aliases("train")) - {"draft"}
# The fields `prediction` and `suffix` of a request, which are spelled like a kind, and the mark of a text after a gap.
FIELDS = {("sametoken.engine.llm_requests", "prediction"), ("sametoken.server.replies", "prediction"),
          ("sametoken.server.schema", "prediction"), ("sametoken.checkpoint.gguf.tokenizer", "suffix"),
          ("sametoken.server.llama.infill", "suffix"), ("sametoken.server.schema", "suffix")}  # fmt: skip


def within(module: str, places: set[str]) -> bool:
    return any(module == place or module.startswith(f"{place}.") for place in places)


@cache
def sources() -> dict[str, ast.Module]:
    """Every module outside the kinds' own folders."""
    found = {}
    for file in sorted(SOURCES.rglob("*.py")):
        module = ".".join(("sametoken", *file.relative_to(SOURCES).with_suffix("").parts))
        if not within(module, OWN):
            found[module] = ast.parse(file.read_text(encoding="utf-8"))
    return found


def asked(module: str, tree: ast.Module) -> Iterator[str]:
    """Where a module asks which kind a drafter is."""
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if text in NAMES and id(node) not in documentation:
                if (module, text) not in FIELDS:
                    yield f"{module}:{node.lineno}: the name {text!r}"
            case ast.ImportFrom(module=str(source)) if within(source, OWN):
                yield f"{module}:{node.lineno}: an import from {source}"
            case ast.Import(names=names):
                for name in names:
                    if within(name.name, OWN):
                        yield f"{module}:{node.lineno}: an import of {name.name}"
            case ast.Compare(left=ast.Attribute(attr="version")):
                yield f"{module}:{node.lineno}: a test of a version"
            case ast.Match(subject=ast.Attribute(attr="version")):
                yield f"{module}:{node.lineno}: a match of a version"


def test_nobody_asks_which_kind_a_drafter_is() -> None:
    found = sources()
    assert len(found) > 150
    assert [place for module, tree in found.items() for place in asked(module, tree)] == []


def test_a_name_that_is_also_a_field_is_still_used() -> None:
    found = sources()
    for module, field in FIELDS:
        assert any(isinstance(node, ast.Constant) and node.value == field for node in ast.walk(found[module]))


@pytest.mark.parametrize(
    "text",
    [
        "if method == 'eagle3': pass",
        "TABLE = {'ngram': 1}",
        "MODES = ('eagle1', 'draft')",
        "from sametoken.heads.medusa.module import MedusaHeads",
        "def f():\n    import sametoken.heads.eagle.config",
        "x = head.config.version == 1",
        "match config.version:\n    case 3: pass",
    ],
)
def test_the_scan_finds_what_it_forbids(text: str) -> None:
    assert list(asked("sametoken.engine.build", ast.parse(text)))


@pytest.mark.parametrize(
    "text",
    ["'''eagle3'''", "'an eagle3 head'", "from sametoken.heads.kind import Head", "'draft'", "version = file.version"],
)
def test_the_scan_leaves_other_things_alone(text: str) -> None:
    assert not list(asked("sametoken.engine.build", ast.parse(text)))
