"""docs/training.md: our commands next to those of Model Optimizer's example run in its order, with a tiny run each."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from sametoken import embedded
from sametoken.prompts.suites import MT_BENCH
from training_checks import MODELOPT_RECIPE

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("### From Model Optimizer's example\n")[2].partition("\n### ")[0]
TARGET = "meta-llama/Llama-3.2-1B-Instruct"
SHORT = {  # words that make a run tiny, by the beginning of a command
    "synthesize": ["--max-tokens", "6"],
    "prepare": ["--fill-vocabulary"],
    "train": ["--max-steps", "1", "--threads", "1"],
    "evaluate": ["--num-samples", "8"],
}
MADE = (
    "input_conversations/train.jsonl", "synthetic/train.jsonl", "draft_vocab_cache/vocabulary.safetensors",
    "one/head/config.json", "ckpts/head/config.json", None, "hidden_states/hidden/manifest.json",
    "offline/head/config.json", None, "export/config.json", "export-vllm/config.json",
)  # fmt: skip


def commands() -> list[list[str]]:
    (block,) = re.findall(r"```sh\n(.*?)```", SECTION, flags=re.DOTALL)
    return [shlex.split(line.replace(TARGET, embedded.NAME))[1:] for line in block.splitlines()]


def test_every_row_names_a_command_of_ours() -> None:
    named = [
        int(number)
        for row in SECTION.splitlines()
        if row.startswith("| `")
        for number in re.findall(r"\b\d+\b", row.split("|")[2])
    ]
    assert set(range(1, len(commands()) + 1)) <= set(named)
    scripts = """make_dataset.py server_generate.py calibrate_draft_vocab.py train_eagle3_and_export.sh launch_train.sh
    main.py compute_hidden_states_hf.py ar_validate.py export_hf_checkpoint.py convert_to_vllm_ckpt.py"""
    assert [name for name in scripts.split() if name not in SECTION] == []


def test_the_commands_run_in_their_order(
    tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    monkeypatch.chdir(tmp_path)
    spec = "outputs: [{filename: a, global_limit: 3, sources: [{name: daring-anteater, splits: {train: 0.5}}]}]"
    (tmp_path / "example_data_config.yaml").write_text(spec)
    rows = [{"conversations": [{"from": "User", "value": f"Hello {n}!"}]} for n in range(8)]
    (tmp_path / "daring-anteater-train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "eagle3.yaml").write_text(MODELOPT_RECIPE)
    turns = [{"question_id": n, "category": c, "turns": ["Hello!", "And?"]} for n in range(10) for c in MT_BENCH]
    (tmp_path / "question.jsonl").write_text("".join(json.dumps(row) + "\n" for row in turns))
    lines = commands()
    assert len(lines) == len(MADE)
    for line, made in zip(lines, MADE, strict=True):
        line = ["500" if word == "32000" else word for word in line]
        extra = SHORT.get(line[0], []) if line[0] != "prepare" or "--draft_vocab_size" in line else []
        done = run(*line, *extra)
        assert done.code == 0, (line, done.err)
        if made is None:
            assert ("nothing was trained" if "--dry_run" in line else "mt-bench: 80 prompts") in done.out
        else:
            assert (tmp_path / made).exists(), (line, done.out)
    assert len((tmp_path / "synthetic" / "train.jsonl").read_text().splitlines()) == 3
