"""Grammars whose compilation would take minutes or gigabytes: refused soon, without harm to others."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from cli_checks import Pair
from sametoken import LLM, RequestError
from sametoken.engine import grammar_trial
from sametoken.engine.grammar import Grammars
from sametoken.limited import Limited
from sametoken.speculation.structure import StructuredOutputs


@pytest.fixture(scope="module")
def llm(tiny_pair: Pair, one_thread: None) -> LLM:
    return LLM(tiny_pair.target)


@pytest.fixture
def grammars(llm: LLM) -> Grammars:
    return Grammars(llm.tokenizer, llm.config.vocab_size)


def conjunction(count: int) -> dict[str, Any]:
    return {"allOf": [{"type": "string", "pattern": f"a{i}.*"} for i in range(count)]}


def resident() -> int:
    """MiB of this process's memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (20, r"takes more than 1\.2 s or 256 MiB"),
        (50, r"takes more than 1\.2 s or 256 MiB"),
        (2000, "too many properties in too many combinations"),
    ],
)
def test_many_patterns_at_once_are_refused_within_two_seconds(grammars: Grammars, count: int, words: str) -> None:
    begin, before = time.monotonic(), resident()
    with pytest.raises(RequestError, match=f"{words}; correct or simplify it"):
        grammars.compile(StructuredOutputs(json=conjunction(count)))
    assert time.monotonic() - begin < 2
    assert resident() - before < 100
    again = time.monotonic()
    with pytest.raises(RequestError, match=words):
        grammars.compile(StructuredOutputs(json=conjunction(count)))
    assert time.monotonic() - again < 0.1


def test_small_grammars_do_not_wait_for_a_trial(grammars: Grammars) -> None:
    grammars.compile(StructuredOutputs(regex="ab*"))  # reads the vocabulary

    def fail() -> None:
        with pytest.raises(RequestError):
            grammars.compile(StructuredOutputs(json=conjunction(100)))

    others = [threading.Thread(target=fail) for _ in range(3)]
    for other in others:
        other.start()
    begin = time.monotonic()
    for _ in range(5):
        grammars.compile(StructuredOutputs(json_object=True))
        time.sleep(0.05)
    assert time.monotonic() - begin < 1
    assert any(other.is_alive() for other in others)
    for other in others:
        other.join()


@pytest.mark.parametrize(
    "form",
    [
        {"json": conjunction(4)},
        {"json": {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(100)}}},
        {"grammar": 'start: A "b"\nA: /a+/ & /[a-c]*/'},
        {"grammar": 'start: <[5-9]> "a"'},
    ],
    ids=str,
)
def test_what_passes_the_trial_is_compiled(grammars: Grammars, form: dict[str, Any]) -> None:
    assert grammars.compile(StructuredOutputs(**form)).failure is None


def test_a_grammar_may_name_special_tokens(grammars: Grammars, llm: LLM) -> None:
    name = next((text for text in llm.tokenizer.info()["additional_special_tokens"] if text.startswith("<")), None)
    if name is None:
        pytest.skip("this tokenizer has none that a grammar can name")
    text = f"start: {name} A\nA: /a+/ & /[a-c]*/"
    assert grammar_trial.trial(json.dumps(fields(text)), [name], 10) is None


def fields(text: str) -> dict[str, Any]:
    return asdict(StructuredOutputs(grammar=text))


def test_a_trial_that_cannot_begin_is_an_error_of_the_moment(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_trial, "WORK", Limited(grammar_trial.__name__, grammar_trial.LIMITS))
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(RequestError, match=r"no process could be started.*; try again later"):
        grammars.compile(StructuredOutputs(json=conjunction(4)))
    monkeypatch.undo()
    assert grammars.compile(StructuredOutputs(json=conjunction(4))).failure is None


@pytest.mark.parametrize(
    "schema", [{"$ref": "#"}, {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}]
)
def test_references_in_a_circle_are_named(grammars: Grammars, schema: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="no text satisfies the schema, since its references go round in a circle"):
        grammars.compile(StructuredOutputs(json=schema))
