"""Specifications in the form of make_dataset: the parts that are taken, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sametoken.errors import SametokenError
from sametoken.prompts.conversations import files_of, read_records
from sametoken.train.dataset.preparation import data_digest

SPEC = """
outputs:
  - filename: input_conversations/train.jsonl
    global_limit: {limit}
    sources:
      - name: mtbench
        splits: ["all"]
      - name: ultrachat
        splits: {{train_gen: 0.5, train_sft: 3, test_gen: 0}}
      - name: magpie
        splits: {{300k: all}}
"""


def lines(file: Path, rows: list[dict[str, Any]]) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def chat(text: str) -> dict[str, Any]:
    turns = [{"from": "human", "value": text}, {"from": "gpt", "value": "Yes."}]
    return {"conversation_id": "same", "conversations": turns}


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    lines(tmp_path / "mtbench.jsonl", [{"question_id": n, "turns": [f"question {n}", "more"]} for n in range(4)])
    lines(tmp_path / "ultrachat" / "train_gen.jsonl", [chat(f"gen {n}") for n in range(10)] * 2)
    lines(tmp_path / "ultrachat-train_sft.jsonl", [chat(f"sft {n}") for n in range(10)])
    lines(tmp_path / "magpie" / "300k.jsonl", [{"instruction": f"do {n}", "response": "done"} for n in range(5)])
    return write(tmp_path, SPEC.format(limit="null"))


def write(place: Path, text: str) -> Path:
    (place / "spec.yaml").write_text(text)
    return place / "spec.yaml"


def prompts(spec: Path) -> list[str]:
    return [record.messages[0]["content"] for record in read_records(spec)]


def test_parts_are_taken_as_stated(spec: Path) -> None:
    found = prompts(spec)
    assert [sum(text.startswith(kind) for text in found) for kind in ("question", "gen", "sft", "do")] == [4, 5, 3, 5]
    assert len(set(found)) == len(found)  # copies count once
    assert prompts(spec) == found
    assert next(iter(read_records(spec))).rest["source"] == "mtbench-all"
    assert len(prompts(write(spec.parent, SPEC.format(limit=6)))) == 6


def test_the_digest_follows_the_files(spec: Path) -> None:
    before = data_digest([spec])
    assert len(files_of(spec)) == 5
    lines(spec.parent / "mtbench.jsonl", [{"turns": ["other"]}])
    assert data_digest([spec]) != before


def test_commands_read_it(spec: Path, run: Any, tmp_path: Path) -> None:
    common = ["embedded", "--data", str(spec), "--output"]
    done = run("prepare", *common, str(tmp_path / "prepared"), "--all-tokens", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["samples"] == 17
    done = run("synthesize", *common, str(tmp_path / "answers.jsonl"), "--max-tokens", "2")
    assert done.code == 0, done.err
    ids = [json.loads(line)["conversation_id"] for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert len(ids) == len(set(ids)) == 17


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("outputs: 3", "expected a mapping with a list under outputs"),
        ("outputs: []\nother: 1", "unknown key 'other'"),
        ("outputs: [{filename: a, sources: [{name: mtbench, splits: [all]}], limit: 1}]", "unknown key 'limit'"),
        ("outputs: [{filename: a, sources: [{name: mtbench}]}]", "expected name and splits"),
        ("outputs: [{filename: a, sources: [{name: mtbench, splits: {all: -1}}]}]", "expected a number of conv"),
        ("outputs: [{filename: a, sources: [{name: mtbench, splits: {all: some}}]}]", "a share or all"),
        ("outputs: [{filename: a, sources: [{name: mtbench, splits: {all: .nan}}]}]", "a share or all"),
        ("outputs: [{filename: a, sources: [{name: mtbench, splits: [[all]]}]}]", "expected a list, or split: amount"),
        ("outputs: [{filename: a, sources: [{name: mtbench, splits: {all: 0}}]}]", "no split has an amount"),
        (
            "outputs: [{filename: a, sources: [{name: sharegpt, splits: [all]}]}]",
            "no file for all of sharegpt; nothing",
        ),
        ("outputs: [", "is not YAML"),
        ("[]", "expected keys with values"),
    ],
)
def test_refusals(spec: Path, run: Any, text: str, message: str) -> None:
    with pytest.raises(SametokenError, match="(?s)" + message):
        prompts(write(spec.parent, text))
    done = run("prepare", "embedded", "--data", str(spec), "--show", "1")
    assert (done.code, len(done.err.strip().splitlines())) == (2, 1)
