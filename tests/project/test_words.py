"""Docstrings and comments of the package use plain technical English."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

import sametoken

PACKAGE = Path(sametoken.__file__).parent
# Words to avoid, and what to write instead.
BANNED = {
    "machines that speak": ("says? said saying tells? told knows? knew hears? heard asks? asked wants?", "the fact"),
    "subjects without a noun": ("what whatever whoever nobody beside", "the noun"),
    "figures of speech": ("absurd luck spurned sayers?", "the fact"),
    "words of this project": ("rotations? token.vectors? vectors?.of.tokens", "RoPE, embeddings"),
}
WORDS = re.compile(rf"\b({'|'.join('|'.join(words.split()) for words, _ in BANNED.values())})\b", re.IGNORECASE)
OPENINGS = re.compile(r"(As|See|The rest|Nothing|Everything|Anything)\b")
BREATH = re.compile(r"\b\w+: .*[.;] `\w+`: ")  # two attributes in one line
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def documented_names_left_out(text: str) -> str:
    """Text without code in backticks, and without the names at the beginnings of lines of attributes."""
    return re.sub(r"^\s*\w+(, \w+)*: |`[^`]*`", " ", text, flags=re.MULTILINE)


def flaws(source: str) -> list[str]:
    """Banned words, openings and attributes in one line, in docstrings and comments, each with its line number."""
    found = []
    for node in ast.walk(ast.parse(source)):
        text = (ast.get_docstring(node) or "") if isinstance(node, DOCUMENTED) else ""
        line = getattr(node, "lineno", 1)
        found += [f"{line}: {word}" for word in WORDS.findall(documented_names_left_out(text))]
        found += [f"{line}: {match[0]}" for match in [OPENINGS.match(text), BREATH.search(text)] if match]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            found += [f"{token.start[0]}: {word}" for word in WORDS.findall(documented_names_left_out(token.string))]
    return found


@pytest.mark.parametrize("room", sorted(each.name for each in PACKAGE.iterdir()))
def test_a_room_uses_plain_words(room: str) -> None:
    files = sorted((PACKAGE / room).rglob("*.py")) or [PACKAGE / room]
    texts = {file.relative_to(PACKAGE): file.read_text(encoding="utf-8") for file in files if file.suffix == ".py"}
    assert {str(file): found for file, text in texts.items() if (found := flaws(text))} == {}


def test_the_scan_finds_what_it_forbids() -> None:
    source = (
        '"""See the rest, as the file says.\n\nAttributes:\n    a: one. `b`: two.\n"""\n'
        "def f():\n    x = 1  # Nobody knows the token vectors beside it.\n"
    )
    assert flaws(source) == ["1: says", "1: See", "1: a: one. `b`: ", *(
        f"7: {word}" for word in ("Nobody", "knows", "token vectors", "beside")
    )]  # fmt: skip


def test_the_scan_passes_plain_words() -> None:
    source = '"""Number of tokens.\n\nAttributes:\n    said: bits of `what`.\n"""\nasked = 1  # requested tokens\n'
    assert flaws(source) == []
