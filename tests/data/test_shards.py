"""Shards: cut and put together, a file is what it was."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sametoken.data.shards import combine, shard
from sametoken.errors import ConfigError, DataError
from sametoken.prompts.conversations import read_records

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
TURNS = st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "gpt"]), "content": TEXT}), min_size=1)
ROWS = st.lists(
    st.fixed_dictionaries(
        {"messages": TURNS}, optional={"id": TEXT.filter(bool), "rest": st.recursive(TEXT, st.lists, max_leaves=3)}
    ),
    min_size=1,
    max_size=9,
)


def write(file: Path, rows: list[dict[str, Any]]) -> bytes:
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8", newline="\n")
    return file.read_bytes()


@settings(max_examples=30, deadline=None)
@given(ROWS, st.integers(1, 10))
def test_cutting_and_putting_together_is_the_identity(rows: list[dict[str, Any]], lines: int) -> None:
    with TemporaryDirectory() as made:
        root = Path(made)
        content = write(root / "in.jsonl", rows)
        shards = shard(root / "in.jsonl", root / "plain", lines, number=False)
        assert combine(root / "plain", root / "plain.jsonl") == (len(shards), len(rows))
        assert (root / "plain.jsonl").read_bytes() == content
        assert [len(list(read_records(file))) for file in shards[:-1]] == [lines] * (len(shards) - 1)
        shard(root / "in.jsonl", root / "numbered", lines)
        combine(root / "numbered", root / "numbered.jsonl")
        assert list(read_records(root / "numbered.jsonl")) == list(read_records(root / "in.jsonl"))


def test_names_and_ids(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", [{"messages": [{"role": "user", "content": "a"}]}] * 12)
    made = shard(tmp_path / "in.jsonl", tmp_path / "out", 1)
    assert [made[0].name, made[11].name] == ["train-00000-00000.jsonl", "train-00011-00011.jsonl"]
    assert [record.id for file in made for record in read_records(file)] == [str(n) for n in range(1, 13)]


def test_combining_leaves_out_what_is_no_conversation(tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    shards.mkdir()
    row = {"conversation_id": "a", "conversations": [{"role": "user", "content": "a"}]}
    write(shards / "b.jsonl", [{"conversation_id": "b", "text": "t"}, {"conversation_id": "c"}, {"finished": True}])
    write(shards / "a.jsonl", [row])
    write(shards / "a.jsonl.failed.jsonl", [{"conversation_id": "d", "error": "e"}])
    (shards / "a.jsonl.run.json").write_text("{}")
    assert combine(shards, tmp_path / "all.jsonl") == (2, 2)
    found = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert found == [row, {"conversation_id": "b", "text": "t"}]


@pytest.mark.parametrize("bad", ["{", '{"messages": "\\ud800"}'])
def test_a_bad_line_leaves_nothing_behind(tmp_path: Path, bad: str) -> None:
    (tmp_path / "in.jsonl").write_text('{"a": 1}\n{"a": 2}\n' + bad)
    with pytest.raises(DataError, match="line 3"):
        shard(tmp_path / "in.jsonl", tmp_path / "out", 1)
    assert list((tmp_path / "out").iterdir()) == []


def test_nothing_is_overwritten_or_made_of_nothing(tmp_path: Path, run: Any) -> None:
    (tmp_path / "in.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "empty.jsonl").write_text('{"finished": true}\n')
    cut = ("shard", "--input_path", str(tmp_path / "in.jsonl"), "--output_dir", str(tmp_path / "out"))
    assert run(*cut, "--max_lines_per_shard", "10").out.endswith(
        "1 shards, train-00000-00000.jsonl to train-00000-00000.jsonl\n"
    )
    assert "is there already" in run(*cut).err
    join = ("shard", "--combine", "--input_dir", str(tmp_path / "out"), "--output_path")
    assert "in.jsonl exists" in run(*join, str(tmp_path / "in.jsonl")).err
    assert run(*join, str(tmp_path / "again.jsonl")).code == 0
    assert (tmp_path / "again.jsonl").read_text() == '{"a": 1, "conversation_id": "1"}\n'
    with pytest.raises(DataError, match="holds no conversations"):
        shard(tmp_path / "empty.jsonl", tmp_path / "none", 1)
    with pytest.raises(ConfigError, match=r"holds no \.jsonl"):
        combine(tmp_path / "nowhere", tmp_path / "x.jsonl")
    for arguments, words in (
        ((*cut, "--max-lines-per-shard", "0"), "expected at least 1"),
        ((*cut, "--combine"), "--input-path is for cutting"),
        (("shard", "--output_path", "x"), "--output-path is for putting together"),
        (("shard", "--output_dir", "x"), "--input-path is missing"),
    ):
        answer = run(*arguments)
        assert answer.code == 2
        assert words in answer.err
