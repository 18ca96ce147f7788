"""A training run's output directory in the place of a draft: what it trained is used, and the log says so."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from cli_checks import Pair
from head_checks import eagle_config, random_weights, shape_of
from sametoken import LLM, SametokenError
from sametoken.heads.eagle.module import EagleHead
from sametoken.heads.write import write_head

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def trained(tiny_pair: Pair, tmp_path: Path) -> Path:
    """What `sametoken train --output-dir` leaves: a head beside checkpoints."""
    target, run = shape_of(tiny_pair.target), tmp_path / "run"
    head = EagleHead(eagle_config(target), torch.float32)
    random_weights(head)
    write_head(head, run / "head", target, target_name=tiny_pair.target)
    (run / "checkpoint-10").mkdir()
    return run


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "{target}", "--draft", "{run}", "--prompt", "a b", "--max-tokens", "4"],
        ["verify", "{target}", "--draft", "{run}", "--num-prompts", "1", "--max-tokens", "4"],
        ["bench", "{target}", "--draft", "{run}", "--limit", "1", "--output-len", "4", "--repeat", "1"],
        ["doctor", "{run}", "--target", "{target}", "--no-measure"],
        ["evaluate", "{run}", "--target", "{target}", "--data", "{data}", "--osl", "4"],
        ["export", "{run}", "--target", "{target}", "--output", "{out}"],
    ],
    ids=lambda command: command[0],
)
def test_every_command_takes_a_run(
    command: list[str], trained: Path, tiny_pair: Pair, tmp_path: Path, run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    data = tmp_path / "chat.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "a b c"}, {"role": "assistant", "content": "d"}]}\n')
    places = {"target": tiny_pair.target, "run": trained, "data": data, "out": tmp_path / "out"}
    answer = run(*(each.format(**places) for each in command))
    assert answer.code == 0, answer.err
    assert f"{trained} is a training run; using the head that it made, {trained / 'head'}" in caplog.text


def test_a_run_of_a_draft_model(tiny_pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(tiny_pair.draft, tmp_path / "run" / "draft")
    llm = LLM(tiny_pair.target, str(tmp_path / "run"))
    assert "draft_target" in llm.methods
    assert "using the draft" in caplog.text


def test_a_model_saved_with_a_head_in_training(tiny_pair: Pair, trained: Path) -> None:
    shutil.copytree(tiny_pair.target, trained, dirs_exist_ok=True)
    (trained / "sametoken.json").write_text("{}")
    assert LLM(tiny_pair.target, str(trained)).method == "eagle3"


def test_a_model_with_a_directory_called_head_is_a_model(
    tiny_pair: Pair, trained: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(tiny_pair.draft, trained, dirs_exist_ok=True)
    caplog.set_level(logging.WARNING)
    assert "draft_target" in LLM(tiny_pair.target, str(trained)).methods
    assert "training run" not in caplog.text


def test_a_run_without_a_head_yet(tiny_pair: Pair, trained: Path) -> None:
    shutil.rmtree(trained / "head")
    with pytest.raises(SametokenError, match=r"a training run without a finished head or draft; go on with `sametoken"):
        LLM(tiny_pair.target, str(trained))


def test_a_run_is_no_model(tiny_pair: Pair, trained: Path) -> None:
    with pytest.raises(SametokenError, match=r"has no config\.json"):
        LLM(str(trained))
