"""No error's English is parsed by code: what a program needs of an error is data of the error."""

import ast
import copy
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError, field_validator

import sametoken
from sametoken.errors import (
    LONGEST_MESSAGE,
    CheckpointError,
    PromptTooLongError,
    RequestError,
    SametokenError,
    found_wrong,
)
from sametoken.options.sampling import RequestSpeculation, SamplingParams
from sametoken.speculation.structure import StructuredOutputs

SOURCE = Path(sametoken.__file__).parent
SEARCHES = {
    "partition", "rpartition", "removeprefix", "removesuffix", "startswith", "endswith", "find", "rfind", "index",
    "replace", "count",
}  # fmt: skip
MATCHES = {"match", "search", "fullmatch", "findall", "finditer", "split", "sub"}  # of `re`


def caught(tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Names that hold an error, and where: of an except clause, or of an argument whose type is one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name, node
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for argument in (*node.args.args, *node.args.kwonlyargs):
                if argument.annotation is not None and "Error" in ast.unparse(argument.annotation):
                    yield argument.arg, node


def is_message(node: ast.AST, error: str) -> bool:
    """Whether an expression is the text of an error, or of a problem that pydantic found."""
    words = ast.unparse(node)
    return words in (f"str({error})", f"{error}.args[0]", f"{error}.problem") or words.endswith(("['msg']", ".message"))


def parsed(tree: ast.AST) -> Iterator[int]:
    """Lines that search in the message of an error."""
    for error, place in caught(tree):
        for node in ast.walk(place):
            if isinstance(node, ast.Compare) and any(isinstance(each, ast.In | ast.NotIn) for each in node.ops):
                found = any(is_message(each, error) for each in node.comparators)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                own, name = node.func.value, node.func.attr
                searched = is_message(own, error) and (name in SEARCHES or (name == "split" and node.args))
                by_pattern = name in MATCHES and any(is_message(each, error) for each in node.args)
                found = bool(searched) or by_pattern
            else:
                found = False
            if found:
                yield node.lineno


def test_nothing_in_the_package_searches_in_the_text_of_an_error():
    found = [
        f"{file.relative_to(SOURCE)}:{line}"
        for file in sorted(SOURCE.rglob("*.py"))
        for line in parsed(ast.parse(file.read_text()))
    ]
    assert found == []


@pytest.mark.parametrize("line", [
    "if 'stop' in str(error): pass",
    "name = str(error).partition(':')[0]",
    "words = str(error).split(';')",
    "words = error.args[0].removeprefix('Value error, ')",
    "found = re.match('(.*): got', str(error))",
    "said = error.errors()[0]['msg'].removeprefix('Value error, ')",
])  # fmt: skip
def test_the_scan_finds_a_search(line):
    assert list(parsed(ast.parse(f"try:\n    pass\nexcept ValueError as error:\n    {line}\n"))) == [4]


@pytest.mark.parametrize(("make", "field", "place"), [
    (lambda: SamplingParams(top_p=2.0), "top_p", ""),
    (lambda: SamplingParams(logit_bias={5: 1000}), "logit_bias", "[5]"),
    (lambda: SamplingParams(logit_bias={-5: 1}), "logit_bias", " key"),
    (lambda: SamplingParams(min_tokens=9, max_tokens=3), "min_tokens", ""),
    (lambda: SamplingParams(allowed_token_ids=[1], min_tokens=1), "allowed_token_ids", ""),
    (lambda: RequestSpeculation(max_draft_len=-1), "speculative", ".max_draft_len"),
    (lambda: RequestSpeculation(enabled=1), "speculative", ".enabled"),
    (lambda: StructuredOutputs(regex=5), "structured_outputs", ".regex"),
    (lambda: StructuredOutputs(), "structured_outputs", ""),
])  # fmt: skip
def test_a_refused_parameter_is_named_as_data(make, field, place):
    with pytest.raises(RequestError) as raised:
        make()
    error = raised.value
    assert (error.field, error.place) == (field, place)
    assert str(error).startswith(f"{field}{place}: ")
    assert str(error.about("another")) == f"another{str(error)[len(field) :]}"


def test_a_message_is_made_of_its_parts():
    error = RequestError("got 2, expected 1", field="n", place=".x", advice="give 1")
    assert str(error) == "n.x: got 2, expected 1; give 1"
    assert str(RequestError("the prompt is empty")) == "the prompt is empty"
    assert str(CheckpointError("no weights").about("/models/a")) == "/models/a: no weights"
    assert len(str(SametokenError("x" * 10 * LONGEST_MESSAGE, field="f"))) < LONGEST_MESSAGE + 20


@pytest.mark.parametrize("copied", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_a_copy_has_the_same_parts(copied):
    error = copied(PromptTooLongError("got 9 tokens", field="prompt", advice="shorten it"))
    assert (type(error), str(error)) == (PromptTooLongError, "prompt: got 9 tokens; shorten it")


def test_our_own_words_are_found_in_what_pydantic_reports():
    class Settings(BaseModel):
        name: str
        size: int = 0

        @field_validator("name")
        @classmethod
        def _known(cls, given: str) -> str:
            raise ValueError(f"Value error, is how this begins: {given}")

    def words(**values: object) -> str:
        with pytest.raises(ValidationError) as raised:
            Settings.model_validate(values)
        return found_wrong(raised.value.errors()[0])

    assert words(name="a") == "Value error, is how this begins: a"
    assert words(name=5) == "expected a valid string"
