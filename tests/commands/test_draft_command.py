"""`sametoken draft` at tiny size: a whole run, one that is interrupted everywhere, and what is refused."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from sametoken.commands import draft_run, draft_stages
from sametoken.commands.draft_stages import DraftState, Stage
from sametoken.data.journal import Lines
from sametoken.errors import UnsupportedModelError
from sametoken.prompts.conversations import read_records
from sametoken.train.budget import DraftPlan
from sametoken.train.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")
STAGES = ("held-out", "answers", "prepare", "train", "quantize", "bench", "evaluate")
TINY = DraftPlan(4, 10, 1.0, True, 1, 1, 4, 1, dict.fromkeys(STAGES, 1.0))
WORDS = ["draft", "embedded", "--threads=1", "--max-tokens=12", "--output-dir"]


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """A plan of seconds, and an exact measurement of less."""
    monkeypatch.setattr(draft_run, "plan", lambda rates, limits: TINY)
    monkeypatch.setattr(draft_run, "epochs_left", lambda *given: 6.0)
    monkeypatch.setattr(draft_stages, "MEASURED", 4)
    monkeypatch.setattr(draft_stages, "MEASURED_STEPS", 2)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("whole") / "run"


def trained(out: Path) -> dict[str, bytes]:
    """Files of a run that must not depend on interruptions."""
    files = ("held-out.jsonl", "greedy.jsonl", "sampled.jsonl", "prepared/samples.safetensors",
             "training/head/model.safetensors", "head-int8/model.safetensors")  # fmt: skip
    return {name: (out / name).read_bytes() for name in files}


def test_one_command_makes_a_head_with_its_card(whole, run, monkeypatch):
    quantised = Stage.run

    def refusing(self: Stage):
        if self.key == "quantize int4":
            raise UnsupportedModelError("fc has 1728 inputs")
        return quantised(self)

    monkeypatch.setattr(Stage, "run", refusing)  # a format that the sizes of a head do not allow is left out
    done = run(*WORDS, str(whole))
    assert done.code == 0, done.err
    assert f"serve it: sametoken serve embedded --draft {whole}/head" in done.out
    assert "sametoken train embedded --num-epochs 1.0" in done.err  # the plan, before the work
    card = (whole / "head" / "README.md").read_text()
    assert "base_model: embedded" in card
    assert "the head in int4 is left out: fc has 1728 inputs" in done.err
    assert ("| trained | 4.1 |" in card, "| int8 |" in card, "| int4 |" in card) == (True, True, False)
    assert "Acceptance length is the number of tokens for each forward of the target" in card
    assert f"sametoken train embedded --num-epochs 6.0 --seed 0 --threads 1 --output-dir {whole}/training" in card
    assert [record.messages[0] for record in read_records(whole / "held-out.jsonl")]
    assert not (whole / "measured").exists()
    served = run("generate", "embedded", "--draft", str(whole), "--prompt", "Hello", "--max-tokens", "4")
    assert served.code == 0, served.err
    again = run(*WORDS, str(whole), "--json")
    assert again.code == 0
    found = json.loads(again.out)
    assert found["head"] == f"{whole}/head"
    assert found["results"]["evaluate 0"]["prompts"] == 4
    assert found["results"]["train"]["steps"] == found["results"]["train"]["total"]


def test_interrupted_everywhere_it_makes_the_same_head(whole, tmp_path, run, monkeypatch):
    """Each stage is stopped: two by a signal within, all between their end and its note, as by a kill."""
    out, ends = tmp_path / "run", []
    append, step, finish = Lines.append, Trainer._step, DraftState.finish
    signals = {"lines": 3, "steps": 3}

    def stop(what: str) -> None:
        signals[what] -= 1
        if not signals[what]:
            os.kill(os.getpid(), signal.SIGINT)

    def killed(self: DraftState, stage: str, *found) -> None:
        if stage not in ends:
            ends.append(stage)
            raise KeyboardInterrupt
        finish(self, stage, *found)

    def counted(self: Trainer, *given):
        if "measured" not in str(self.directory):
            stop("steps")
        return step(self, *given)

    monkeypatch.setattr(Lines, "append", lambda self, entry: (append(self, entry), stop("lines")))
    monkeypatch.setattr(Trainer, "_step", counted)
    monkeypatch.setattr(DraftState, "finish", killed)
    stopped = 0
    while "bench trained" not in ends and stopped < 20:
        answer = run(*WORDS, str(out))
        assert answer.code == 130, answer.err
        stopped += 1
    assert stopped == len(ends) + 2
    assert trained(out) == trained(whole)


def test_given_conversations_are_answered_anew_and_divided(tmp_path, run, monkeypatch):
    turns = [[{"from": "human", "value": f"Where is the station number {n}?"}, {"from": "gpt", "value": "Over there!"}]
             for n in range(24)]  # fmt: skip
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"conversations": each, "category": "travel"}) + "\n" for each in turns))

    def finish(self: DraftState, stage: str, *found) -> None:
        if stage == "prepare":
            raise KeyboardInterrupt
        DraftState.note(self, 0.0)

    monkeypatch.setattr(DraftState, "finish", finish)
    out = tmp_path / "run"
    answer = run(*WORDS, str(out), "--data", str(data))
    assert answer.code == 130, answer.err
    held, greedy, sampled = (list(read_records(out / f"{name}.jsonl")) for name in ("held-out", "greedy", "sampled"))
    assert (len(held), len(greedy), len(sampled)) == (2, 5, 5)
    said = [[record.messages[0]["content"] for record in each] for each in (held, greedy, sampled)]
    assert len({text for each in said for text in each}) == 12
    assert held[0].rest == {"category": "travel"}
    assert all(record.messages[1]["content"] != "Over there!" for record in (*greedy, *sampled))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--budget", "soon"], "expected a time such as 2h"),
        (["--data", "{bad}"], "expected either conversations or messages"),
        (["--data", "{few}"], "--data has 3 conversations, expected at least 10"),
        (["--seed", "-1"], "at least 0"),
        ([], "has files but no draft.json"),
    ],
    ids=str,
)
def test_refuses_in_one_line(tmp_path, run, words, message):
    (tmp_path / "bad.jsonl").write_text('{"question": "How?", "answer": "So."}\n')
    (tmp_path / "few.jsonl").write_text('{"messages": [{"role": "user", "content": "How?"}]}\n' * 3)
    given = [word.format(bad=tmp_path / "bad.jsonl", few=tmp_path / "few.jsonl") for word in words]
    answer = run(*WORDS, str(tmp_path), *given)
    assert answer.code == 2
    assert message in answer.err
    assert len(answer.err.strip().splitlines()) == 1


def test_refuses_the_directory_of_another_run_and_names_the_difference(whole, run):
    for more, message in (
        (["--max-tokens=9"], "was begun with max_tokens = 12, now it is 9"),
        (["--budget", "3h"], "was begun with budget in seconds = 3600.0, now it is 10800.0"),
    ):
        answer = run(*WORDS, str(whole), *more)
        assert answer.code == 2
        assert message in answer.err
        assert len(answer.err.strip().splitlines()) == 1
