"""Prompts of files: published forms of conversations are read by every command that takes prompts."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from sametoken.commands.given import given_prompts
from sametoken.errors import SametokenError
from sametoken.prompts.sources import Conversation

ASKED = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
ANSWER = {"role": "assistant", "content": "Hello"}
FORMS = {
    "ShareGPT": {
        "id": "a_0",
        "conversations": [
            {"from": "system", "value": "Be short."},
            {"from": "human", "value": "Hi"},
            {"from": "gpt", "value": "Hello"},
        ],
    },
    "UltraChat": {"prompt": "Hi", "prompt_id": "7", "messages": [*ASKED, ANSWER]},
    "a question alone": {"messages": ASKED},
    "a system text apart": {"system": "Be short.", "conversations": [{"from": "human", "value": "Hi"}]},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("array", [False, True])
def test_the_prompt_of_a_conversation_is_all_before_the_last_answer(tmp_path: Path, form: str, array: bool) -> None:
    file = tmp_path / "data.json"
    file.write_text(json.dumps([FORMS[form]] if array else FORMS[form]))
    assert given_prompts((), str(file), chat=False) == [Conversation(ASKED)]


def standard_input(monkeypatch: Any, content: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_standard_input_takes_the_same_lines(monkeypatch: Any) -> None:
    standard_input(monkeypatch, "".join(json.dumps(form) + "\n" for form in FORMS.values()).encode())
    assert given_prompts((), "-", chat=False) == [Conversation(ASKED)] * len(FORMS)


@pytest.mark.parametrize(("texts", "file"), [((), "-"), (("-",), None)])
def test_standard_input_that_is_not_utf_8_is_refused(monkeypatch: Any, texts: tuple[str, ...], file: Any) -> None:
    standard_input(monkeypatch, b'{"prompt": "\xff"}')
    with pytest.raises(SametokenError, match="byte 12 is not UTF-8"):
        given_prompts(texts, file, chat=False)


@pytest.mark.parametrize("entry", [{"messages": None, "prompt": "Hi"}, {"prompt": "Hi", "source": "a file"}])
def test_empty_columns_and_the_source_of_a_specification_are_no_errors(tmp_path: Path, entry: dict[str, Any]) -> None:
    (tmp_path / "data.jsonl").write_text(json.dumps(entry))
    entry.pop("messages", None)
    assert given_prompts((), str(tmp_path / "data.jsonl"), chat=False) == ["Hi"]
