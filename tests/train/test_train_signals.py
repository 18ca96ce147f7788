"""Training that signals stop: what was trained is kept, the same command goes on, and nothing worse is served."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_trainer import files_of

from sametoken.checkpoint.hub import read_config
from sametoken.errors import SametokenError
from sametoken.heads.read import read_head
from sametoken.model.config import ModelConfig
from sametoken.train.checkpoints import RECORD, all_checkpoints, load
from training_checks import TAPS, log_of, train_tiny, write_conversations

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS = 400  # more than a test waits for


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_conversations(tmp_path_factory.mktemp("data") / "chat.jsonl")


class Training:
    """The command in a process of its own."""

    def __init__(self, target: str, data: Path, output: Path, *options: str) -> None:
        self.output, self.said = output, ""
        usual = ["--taps", TAPS, "--ttt-steps", "2", "--lr", "3e-3", "--training-seq-len", "128", "--threads", "1",
                 "--logging-steps", "1", "--max-steps", str(STEPS), "--output-dir", str(output)]  # fmt: skip
        self.command = [sys.executable, "-m", "sametoken.cli", "train", target, "--data", str(data), *usual, *options]

    def start(self) -> Training:
        def prepare() -> None:  # a test under nohup inherits ignored signals
            for each in (signal.SIGINT, signal.SIGTERM):
                signal.signal(each, signal.SIG_DFL)

        self.process = subprocess.Popen(
            self.command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, preexec_fn=prepare
        )
        return self

    def wait_for(self, words: str) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said += line
            if words in line:
                return
        raise AssertionError(f"{words!r} was not said, but: {self.said}")

    def end(self) -> int:
        self.said += self.process.communicate(timeout=240)[1]
        return self.process.returncode

    def signalled(self, number: int) -> int:
        self.process.send_signal(number)
        return self.end()


def steps_kept(output: Path) -> int:
    """The step of the last checkpoint, which is whole."""
    last = all_checkpoints(output)[-1]
    found = load(last, read_settings(last))
    return int(found.progress["step"])


def read_settings(checkpoint: Path) -> dict:
    import json

    return dict(json.loads((checkpoint / "manifest.json").read_text())["settings"])


def head_of(target: str, output: Path) -> None:
    config = ModelConfig.from_hf(read_config(Path(target)))
    read_head(output / "head", config, torch.float32, "cpu", pack=False)


@pytest.mark.parametrize(
    ("number", "step"),
    [
        (signal.SIGTERM, 1),
        pytest.param(signal.SIGINT, 3, marks=pytest.mark.thorough),
    ],
)
def test_a_signal_saves_the_step_and_the_same_command_goes_on(pair, data, tmp_path, number, step):
    training = Training(pair.target, data, tmp_path / "out").start()
    training.wait_for(f"step {step}/")
    assert training.signalled(number) == 128 + number
    done = steps_kept(tmp_path / "out")
    assert step <= done < STEPS
    assert f"{number.name}: training ends after this step, with a checkpoint" in training.said
    assert f"stopped after step {done} of {STEPS}; checkpoint-{done} is in {tmp_path / 'out'}; the s" in training.said
    head_of(pair.target, tmp_path / "out")
    again = Training(pair.target, data, tmp_path / "out").start()
    again.wait_for(f"going on from {tmp_path / 'out'}/checkpoint-{done}")
    again.wait_for(f"step {done + 2}/")
    again.process.kill()
    again.end()
    assert [entry["step"] for entry in log_of(tmp_path / "out")][: done + 2] == list(range(1, done + 3))


@pytest.mark.thorough
def test_a_signal_before_the_first_step_is_said(pair, data, tmp_path):
    training = Training(pair.target, data, tmp_path / "out").start()
    training.wait_for("eagle3: ")
    assert training.signalled(signal.SIGTERM) == 143
    assert re.search("interrupted before the first step; the same command begins|stopped after step", training.said)
    assert not list((tmp_path / "out").glob(".*"))


@pytest.mark.thorough
def test_a_second_signal_ends_it_at_once(pair, data, tmp_path):
    training = Training(pair.target, data, tmp_path / "out").start()
    training.wait_for("step 1/")
    training.process.send_signal(signal.SIGINT)
    training.process.send_signal(signal.SIGTERM)
    assert training.end() in (-signal.SIGTERM, 130)  # 130 where the first had ended it already


@pytest.mark.thorough
def test_a_signal_cuts_an_evaluation_short_and_it_is_made_up_for(pair, data, tmp_path):
    evaluated = ("--eval-data", str(data), "--eval-steps", "2", "--eval-tokens", "60", "--eval-prompts", "12",
              "--max-draft-len", "2", "--max-steps", "4")  # fmt: skip
    training = Training(pair.target, data, tmp_path / "out", *evaluated).start()
    deadline = time.monotonic() + 120
    while not list((tmp_path / "out").glob(".judged-*/head/config.json")):
        assert training.process.poll() is None, training.end() or training.said
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert training.signalled(signal.SIGTERM) == 143, training.said
    assert "stopped after step 2 of 4" in training.said
    assert not list((tmp_path / "out").glob(".*"))
    whole = Training(pair.target, data, tmp_path / "whole", *evaluated).start()
    again = Training(pair.target, data, tmp_path / "out", *evaluated).start()
    assert (whole.end(), again.end()) == (0, 0), again.said
    logs = [
        [(e["step"], e["eval_acceptance_length"]) for e in log_of(tmp_path / name) if "eval_acceptance_length" in e]
        for name in ("whole", "out")
    ]
    assert logs[0] == logs[1]
    assert [step for step, _ in logs[0]] == [2, 4]
    assert files_of(tmp_path / "whole" / "head") == files_of(tmp_path / "out" / "head")


@pytest.mark.thorough
@pytest.mark.parametrize("to", ["launcher", "worker"])
def test_two_processes_stop_after_the_same_step(pair, data, tmp_path, monkeypatch, to):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    two = ("--num-gpu", "2", "--device", "cpu")
    training = Training(pair.target, data, tmp_path / "out", *two).start()
    training.wait_for("step 2/")
    if to == "launcher":
        assert training.signalled(signal.SIGINT) == 130
    else:
        children = Path(f"/proc/{training.process.pid}/task/{training.process.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGTERM)
        assert training.end() != 0
    done = steps_kept(tmp_path / "out")
    assert f"stopped after step {done} of {STEPS}" in training.said, training.said
    assert "Traceback" not in training.said
    again = Training(pair.target, data, tmp_path / "out", *two, "--logging-steps", "1").start()
    again.wait_for(f"step {done + 1}/")
    assert again.signalled(signal.SIGTERM) == 143
    assert steps_kept(tmp_path / "out") > done


def in_a_child(work: Callable[[], object]) -> int:
    """The status of a forked process that does something."""
    if child := os.fork():
        return os.waitpid(child, 0)[1]
    try:
        work()
    finally:
        os._exit(0)


def test_a_kill_at_any_moment_of_saving_leaves_what_can_be_loaded(pair, data, tmp_path, monkeypatch):
    """Killed before every file and directory in turn that takes its place."""
    chosen = {"max_steps": 2, "save_steps": 1, "num_epochs": 9, "save_total_limit": 1, "eval_steps": 1,
              "eval_data": "unread", "logging_steps": 1}  # fmt: skip
    train_tiny(pair.target, data, tmp_path / "whole", evaluator=lambda head: 2.0, **chosen)
    prepared = tmp_path / "whole" / "data"
    expected = files_of(tmp_path / "whole" / "checkpoint-2")["model.safetensors"]
    replace, killed = os.replace, 0
    for place in range(30):
        output, calls = tmp_path / str(place), iter(range(1000))

        def dying(source, target, calls=calls, place=place, **options):
            if next(calls) == place:
                os.kill(os.getpid(), signal.SIGKILL)
            return replace(source, target, **options)

        def train(output=output, dying=dying) -> None:
            monkeypatch.setattr(os, "replace", dying)
            train_tiny(pair.target, prepared, output, evaluator=lambda head: 2.0, **chosen)

        if not os.WIFSIGNALED(in_a_child(train)):
            break
        killed += 1
        for checkpoint in all_checkpoints(output):
            load(checkpoint, read_settings(checkpoint))
        if (output / "head").exists():
            head_of(pair.target, output)
        if place % 5 == 3:
            again = train_tiny(pair.target, prepared, output, evaluator=lambda head: 2.0, **chosen)
            assert (again.steps, again.best) == (2, 2.0)
            assert files_of(output / "checkpoint-2")["model.safetensors"] == expected
            assert not list(output.glob(".*"))
            assert not list((output / "head").glob(".*"))
    assert killed > 10


class Scores:
    """An evaluator that says what it is told to, and counts."""

    def __init__(self, *scores: float) -> None:
        self.left = list(scores)

    def __call__(self, head: Path) -> float:
        return self.left.pop(0)


def test_a_worse_head_never_replaces_a_better_one(pair, data, tmp_path):
    chosen = {"max_steps": 2, "eval_data": "unread", "eval_steps": 1, "num_epochs": 9}
    out = tmp_path / "out"

    def run(*scores: float, **others: object) -> float | None:
        evaluator = Scores(*scores)
        outcome = train_tiny(pair.target, data, out, evaluator=evaluator, **{**chosen, **others})
        assert not evaluator.left
        return outcome.best

    def begin_anew() -> None:
        for checkpoint in all_checkpoints(out):
            for file in checkpoint.iterdir():
                file.unlink()
            checkpoint.rmdir()

    assert run(1.5, 2.5) == 2.5
    good = files_of(out / "head")
    begin_anew()  # as a run that was killed before it saved, or an error's advice
    assert run(2.0, 1.0) == 2.5
    assert files_of(out / "head") == good
    begin_anew()
    (out / RECORD).unlink()  # as after a kill: the head in place is evaluated first
    assert run(2.2, 2.1, 2.15, lr=1e-3) == 2.2
    assert files_of(out / "head") == good
    begin_anew()
    assert run(1.2, 1.1, 1.15, lr=1e-3, eval_tokens=8) == 1.2  # other questions, other figures
    assert files_of(out / "head") == good
    begin_anew()
    assert run(1.1, 1.3, lr=1e-3, eval_tokens=8) == 1.3
    assert files_of(out / "head") != good
    begin_anew()
    with pytest.raises(SametokenError, match="is a head of an earlier run without a checkpoint to go on from; give"):
        train_tiny(pair.target, data, out, max_steps=2)
