"""Reading conversations: the spellings of data sets become one kind of record, and a bad line is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sametoken.errors import DataError
from sametoken.prompts.conversations import Record, read_records

HELLO = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello\u2028there"}]
SHARED = [{"from": "human", "value": "Hi", "label": None}, {"from": "gpt", "value": "Hello\u2028there"}]


def write(directory: Path, *entries: object, name: str = "data.jsonl", ascii_only: bool = False) -> Path:
    file = directory / name
    file.write_text("\n".join(json.dumps(entry, ensure_ascii=ascii_only) for entry in entries) + "\n", encoding="utf-8")
    return file


@pytest.mark.parametrize("turns", [HELLO, SHARED], ids=["role", "from"])
@pytest.mark.parametrize("key", ["messages", "conversations"])
def test_spellings_become_one(tmp_path: Path, turns: list[Any], key: str) -> None:
    entry = {"id": "a", key: turns, "category": "chat"}
    assert [*read_records(write(tmp_path, entry))] == [Record("a", HELLO, False, {"category": "chat"})]


@pytest.mark.parametrize("name", ["data.json", "data.jsonl"])
def test_an_array_is_read_as_lines_are(tmp_path: Path, name: str) -> None:
    rows = [{"messages": HELLO}, {"finished": True}, {"messages": SHARED, "uuid": "b"}]
    file = tmp_path / name
    file.write_text("\n  " + json.dumps(rows, indent=1), encoding="utf-8")
    assert [record.id for record in read_records(file)] == ["1", "b"]


def test_sentinels_and_empty_lines_are_skipped_and_numbers_are_those_of_lines(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    line = json.dumps({"messages": HELLO})
    text = f'\ufeff\n{line}\r\n{{"conversation_id": 7}}\n{{"id": 8, "messages": []}}\n \n{line}\n{{"finished": true}}'
    file.write_text(text, encoding="utf-8", newline="")
    assert [(record.id, record.messages) for record in read_records(file)] == [("2", HELLO), ("6", HELLO)]


def test_the_first_id_key_counts_and_zero_is_an_id(tmp_path: Path) -> None:
    file = write(tmp_path, {"uuid": "u", "id": None, "conversation_id": 0, "messages": HELLO})
    assert [*read_records(file)] == [Record("0", HELLO, False, {"uuid": "u"})]


def test_system_turns_are_kept_and_a_system_text_leads(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Be brief."}
    file = write(
        tmp_path,
        {"messages": [system, *HELLO]},
        {"system": "Be brief.", "conversations": [{"from": "User", "value": "Hi"}, SHARED[1]]},
        {"system": "", "messages": HELLO},
        {"system": "Not this.", "messages": [system, *HELLO]},
    )
    assert [record.messages for record in read_records(file)] == [[system, *HELLO]] * 2 + [HELLO, [system, *HELLO]]


def test_tool_turns_parts_and_a_cut_answer(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    (record,) = read_records(write(tmp_path, {"messages": [parts, call, {"role": "tool", "content": "3"}]}))
    assert record.messages[:2] == [{"role": "user", "content": "ab"}, {**call, "content": ""}]
    (record,) = read_records(write(tmp_path, {"messages": HELLO, "truncated": True}))
    assert record.truncated
    assert not record.rest


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"messages": [', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("3", "got 3, expected an object"),
        ('{"text": "a"}', "got keys text, expected either conversations or messages"),
        (json.dumps({"messages": HELLO, "conversations": HELLO}), "either"),
        ('{"messages": "Hi"}', "expected a list of messages"),
        ('{"messages": ["Hi"]}', "message 1: got Hi"),
        ('{"messages": [{"role": "user", "content": "a"}, {"role": "root", "content": "b"}]}', "message 2: the role"),
        ('{"messages": [{"role": "user"}]}', "content is None"),
        ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "not text"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "surrogate"),
        ('{"id": [1], "messages": [{"role": "user", "content": "a"}]}', r"id is '\[1\]'"),
        ('{"id": true, "messages": [{"role": "user", "content": "a"}]}', "id is 'True'"),
        ('{"truncated": 1, "messages": [{"role": "user", "content": "a"}]}', "truncated is"),
        ('{"system": "\\udfff", "messages": [{"role": "user", "content": "a"}]}', "surrogate"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, expected: str) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({"messages": HELLO}) + "\n" + line + "\n")
    with pytest.raises(DataError, match=expected) as raised:
        list(read_records(file))
    assert f"{file}, line 2" in str(raised.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.jsonl: No such file"):
        list(read_records(tmp_path / "nowhere.jsonl"))
    (tmp_path / "latin.jsonl").write_bytes(b'{"messages": "\xe9"}\n')
    with pytest.raises(DataError, match="line 1: byte 14 is not UTF-8"):
        list(read_records(tmp_path / "latin.jsonl"))
    (tmp_path / "torn.json").write_text('[{"messages": [')
    with pytest.raises(DataError, match=r"torn\.json is not JSON"):
        list(read_records(tmp_path / "torn.json"))
