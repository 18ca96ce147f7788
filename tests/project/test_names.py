"""A public class has a name of its own, an imported constant one value, and names use the agreed words."""

from __future__ import annotations

import ast
import re
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


# Words of earlier versions that had several meanings, and what is written now.
REPLACED = {
    "bid": "expected gain", "bids": "expected gains", "certain": "committed", "dice": "noise", "ends": "lengths or ids",
    "goal": "target", "goals": "targets", "half": "the draft's KV", "halves": "the draft's KV", "judge": "evaluate",
    "judgement": "evaluation", "loudness": "noise", "painter": "token printer", "reach": "ancestors",
    "speaker": "client", "told": "observed", "trainee": "module", "wish": "requested draft length",
    "wishes": "requested draft lengths",
}  # fmt: skip


def identifiers(source: str) -> set[str]:
    """Names of variables, attributes, parameters, keywords, functions and classes."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        for field in ("id", "attr", "arg", "name"):
            value = getattr(node, field, None)
            found |= {value} if isinstance(value, str) else set()
    return found


def words(name: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def test_names_use_the_words_of_the_field() -> None:
    found = {
        f"{file}: {name}" for file, text in FILES.items() for name in identifiers(text) if words(name) & {*REPLACED}
    }
    assert found == set()


def test_the_scan_of_words_sees_every_kind_of_name() -> None:
    text = "class Judge:\n    def goals(self, bid, *, dice=1): self.reach = f(told=certain)\n    loudness: int"
    assert set().union(*map(words, identifiers(text))) >= {
        "judge", "goals", "bid", "dice", "reach", "told", "certain", "loudness"
    }  # fmt: skip
    assert words("_heldOut_KVCache") == {"held", "out", "kv", "cache"}


BANNED_OPENINGS = re.compile(
    r"(What|The same|How|Whether|Wh(ere|en|ich|o|y)|Says|Asks|Knows|Hears|Tells|Lets|Gives"
    r"|Adds|Computes|Does|Ends|Evaluates|Finds|Goes|Has|Keeps|Leaves|Looks|Makes|Measures|Prints|Puts|Raises"
    r"|Reads|Refuses|Removes|Replaces|Returns|Sends|Serves|Shows|Starts|Takes|Trains|Tries|Waits|Writes)\b"
)


def banned_docstrings(source: str) -> list[str]:
    """First lines of docstrings that begin with neither a noun phrase nor an imperative."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = (ast.get_docstring(node) or "" for node in ast.walk(ast.parse(source)) if isinstance(node, documented))
    return [text.partition("\n")[0] for text in texts if BANNED_OPENINGS.match(text)]


def test_docstrings_begin_with_a_noun_phrase_or_an_imperative() -> None:
    assert {file: found for file, text in FILES.items() if (found := banned_docstrings(text))} == {}


def test_the_scan_of_docstrings_sees_what_it_forbids() -> None:
    source = '"""What a module has."""\nclass A:\n    """The same again."""\n    async def f(): "Tells it."\n'
    assert banned_docstrings(source) == ["What a module has.", "The same again.", "Tells it."]
    assert banned_docstrings('"""Whatever comes."""\ndef f():\n    """Number of whats."""\n') == []
