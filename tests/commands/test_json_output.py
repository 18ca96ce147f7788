"""`--json`: commands that work long print one JSON object on standard output, and nothing else there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli_checks import Pair
from sametoken.cli import module_of

WITH_JSON = (
    "generate", "verify", "bench", "bench compare", "evaluate", "synthesize", "prepare", "quantize", "export", "doctor",
    "train", "demo", "shard", "draft",
)  # fmt: skip


@pytest.mark.parametrize("command", WITH_JSON)
def test_a_command_that_measures_or_works_long_has_json(command: str) -> None:
    (option,) = [each for each in module_of(command).OPTIONS if each.name == "json"]
    assert (option.kind, option.default) == (bool, False)


@pytest.fixture
def data(tmp_path: Path) -> str:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho ho"}]
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps({"id": f"{n}", "messages": turns}) + "\n" for n in range(3)))
    return str(file)


def told(run: Any, *arguments: str) -> dict[str, Any]:
    answer = run(*arguments, "--json")
    assert answer.code == 0, answer.err
    found: dict[str, Any] = json.loads(answer.out)
    return found


def test_verify(run: Any, pair: Pair) -> None:
    arguments = ["--draft", pair.draft, "--num-prompts", "2", "--max-tokens", "4", "--temperatures", "0"]
    found = told(run, "verify", pair.target, *arguments, "--method", "draft_target")
    assert (found["equal"], found["stopped"], found["prompts"], found["difference"]) == (True, False, 2, None)
    assert {(each["method"], each["batched"]) for each in found["cases"]} >= {("draft_target", True)}
    assert all(each["equal"] and each["tokens"] > 0 for each in found["cases"])


def test_bench(run: Any, pair: Pair, tmp_path: Path) -> None:
    arguments = ["--draft", pair.draft, "--limit", "1", "--output-len", "4", "--repeat", "1", "--out", str(tmp_path)]
    found = told(run, "bench", pair.target, *arguments)
    (file,) = tmp_path.glob("bench-*.json")
    assert json.loads(file.read_text()) == found
    assert found["schema"] == "sametoken-bench-1"


def test_demo(run: Any, pair: Pair) -> None:
    found = told(run, "demo", pair.target, "--draft", pair.draft, "--max-tokens", "4", "--repeat", "1")
    assert found["runs"] == 1
    assert len(found["prompts"]) == 4
    assert {each["method"] for each in found["all"]} == {"draft_target"}
    assert found["all"][0]["tokens"] == sum(each["drafts"][0]["tokens"] for each in found["prompts"])


def test_shard(run: Any, data: str, tmp_path: Path) -> None:
    shards, joined = str(tmp_path / "shards"), str(tmp_path / "joined.jsonl")
    found = told(run, "shard", "--input-path", data, "--output-dir", shards, "--max-lines-per-shard", "2")
    assert found == {"output": shards, "shards": sorted(file.name for file in Path(shards).iterdir())}
    found = told(run, "shard", "--combine", "--input-dir", shards, "--output-path", joined)
    assert found == {"output": joined, "lines": 3, "files": 2}


def test_train(run: Any, pair: Pair, data: str, tmp_path: Path) -> None:
    arguments = ["--mode", "medusa", "--data", data, "--output-dir", str(tmp_path / "run"), "--max-steps", "1"]
    found = told(run, "train", pair.target, *arguments, "--threads", "1")
    assert (found["head"], found["steps"], found["stopped"]) == (str(tmp_path / "run" / "head"), 1, False)
    assert found["best"] is None


def test_synthesize_prepare_and_quantize(run: Any, pair: Pair, data: str, tmp_path: Path) -> None:
    answers = str(tmp_path / "answers.jsonl")
    arguments = ["--data", data, "--output", answers, "--max-tokens", "4"]
    found = told(run, "synthesize", pair.target, *arguments)
    assert (found["output"], found["written"], found["failed"], found["kept"]) == (answers, 3, 0, 0)
    assert told(run, "synthesize", pair.target, *arguments)["kept"] == 3

    prepared = str(tmp_path / "prepared")
    found = told(run, "prepare", pair.target, "--data", data, "--output", prepared)
    assert (found["output"], found["samples"], found["hidden_states"]) == (prepared, 3, None)

    rounded = tmp_path / "rounded"
    found = told(run, "quantize", pair.target, "--format", "int8", "--output", str(rounded), "--data", data)
    assert found["format"] == "int8"
    assert Path(found["written"]).exists()
