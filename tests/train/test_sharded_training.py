"""Runs of two processes with sharded targets and drafts: equal to one process, and ended together."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from training_checks import log_of, train_tiny, write_conversations

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS = 4  # of a step; the nine of an epoch leave one process with fewer forwards than the other
COMMON = {"training_seq_len": 64, "max_steps": 4, "num_epochs": 9, "logging_steps": 1, "save_steps": 2}
ALONE = {"train_bs": ROWS}
TOGETHER = {"train_bs": 1, "gradient_accumulation_steps": ROWS // 2, "fsdp_target": True}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_conversations(tmp_path_factory.mktemp("data") / "chat.jsonl", count=11)


def run_two(place: Path, runs: list[dict[str, Any]], seconds: float = 120.0) -> tuple[list[str], list[str]]:
    """What each run ended with in two processes, "" for well; a process that was killed says less."""
    place.mkdir(exist_ok=True)
    opened = [socket.create_server(("127.0.0.1", 0)) for _ in runs]
    for run, each in zip(runs, opened, strict=True):
        run |= {"port": each.getsockname()[1], "differs": run.get("differs", {})}
        run["output"] = str(place / run["output"])
    for each in opened:
        each.close()
    file, tests = place / "runs.json", Path(__file__).parents[1]
    file.write_text(json.dumps(runs))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tests), *sys.path])}
    command = [sys.executable, str(tests / "rank_worker.py"), str(file)]
    started = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(2)]
    try:
        end = time.monotonic() + seconds
        for process in started:
            process.wait(end - time.monotonic())
    finally:
        for process in started:
            process.kill()
    said = [file.with_suffix(f".{rank}") for rank in range(2)]
    first, second = (json.loads(each.read_text()) if each.exists() else [] for each in said)
    return first, second


KINDS: dict[str, dict[str, Any]] = {
    "eagle3": {"fsdp": True, "optim": "muon"},
    "medusa": {"mode": "medusa", "optim": "adamw"},
    "draft": {"mode": "draft", "optim": "adamw", "on_policy": 0.5},
}
Ran = tuple[Path, list[str], list[str]]  # where both processes have run all of it, and how each run ended in each


@pytest.fixture(scope="module")
def common(tiny_pair: Any, data: Path) -> dict[str, Any]:
    return {"target": tiny_pair.target, "data": str(data), **COMMON, **TOGETHER}


@pytest.fixture(scope="module")
def two(common: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A run that succeeds, and two that are refused."""
    runs: list[dict[str, Any]] = [{"output": "eagle3", "chosen": common | KINDS["eagle3"]}]
    runs.append({"output": "options", "chosen": common, "differs": {"lr": 1e-3}})
    runs.append({"output": "absent", "chosen": common, "differs": {"target": f"{common['target']}-absent"}})
    place = tmp_path_factory.mktemp("two")
    return place, *run_two(place, runs)


@pytest.fixture(scope="module")
def others(common: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Runs of the other kinds."""
    place = tmp_path_factory.mktemp("others")
    runs = [{"output": name, "chosen": common | kind} for name, kind in KINDS.items() if name != "eagle3"]
    return place, *run_two(place, runs)


def test_two_processes_with_a_sharded_target_equal_one(pair: Any, data: Path, two: Ran, tmp_path: Path) -> None:
    """Each process of the two has rows of its own, and at times one more than the other."""
    place, first, second = two
    assert (first[0], second[0]) == ("", "")
    check_equal(pair, data, place, tmp_path, "eagle3")


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["medusa", "draft"])
def test_other_kinds_of_two_processes_equal_one(pair: Any, data: Path, others: Ran, tmp_path: Path, name: str) -> None:
    place, *ended = others
    assert ended == [["", ""], ["", ""]]
    check_equal(pair, data, place, tmp_path, name)


def check_equal(pair: Any, data: Path, place: Path, tmp_path: Path, name: str) -> None:
    """Trains in one process, and compares losses and weights with what two made at `place`."""
    train_tiny(pair.target, data, tmp_path, **COMMON, **ALONE, **KINDS[name])
    # Muon rounds to bfloat16 within a step, where a difference in the last bit of a gradient may become one.
    rounds = KINDS[name]["optim"] == "muon"
    for a, b in zip(log_of(tmp_path), log_of(place / name), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-3 if rounds else 1e-5)
    wanted, found = (load_file(each / "checkpoint-4" / "model.safetensors") for each in (tmp_path, place / name))
    for key, tensor in wanted.items():
        torch.testing.assert_close(found[key], tensor, atol=2e-3 if rounds else 5e-5, rtol=1e-3)


def test_processes_that_differ_or_fail_are_named_in_both(two: tuple[Path, list[str], list[str]]) -> None:
    _, first, second = two
    assert first[-2] == second[-2] == "rank 1 has --lr 0.001 and rank 0 has 0.003; start all ranks with the same"
    assert "-absent" in second[-1]
    assert first[-1].startswith("rank 1 of 2 has ended: ")
    assert "-absent" in first[-1]
