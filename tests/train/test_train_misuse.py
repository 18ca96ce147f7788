"""What a careless user does to training and its files: one line that says what to do, and nothing of his is lost."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path

import pytest

from sametoken.checkpoint.paths import user_path
from sametoken.commands.train import _check_devices
from sametoken.errors import ConfigError, DataError, SametokenError
from sametoken.train.dataset.prepared import read_manifest
from sametoken.train.settings import HeadSettings, LossSettings, RunSettings
from training_checks import TAPS, train_tiny, write_conversations

pytestmark = pytest.mark.usefixtures("one_thread")
DEEP = "[" * 100_000


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_conversations(tmp_path_factory.mktemp("data") / "chat.jsonl", 8)


@pytest.fixture(scope="module")
def trained(tiny_pair, data, tmp_path_factory) -> Path:
    """A run of two steps, with a checkpoint after each."""
    output = tmp_path_factory.mktemp("trained")
    train_tiny(tiny_pair.target, data, output, max_steps=2, save_steps=1, draft_vocab_size=12)
    return output


@pytest.fixture
def again(trained, tmp_path) -> Path:
    """A copy of that run, to be spoilt."""
    return Path(shutil.copytree(trained, tmp_path / "again"))


def go_on(target: str, data: Path, output: Path, **chosen: object) -> None:
    train_tiny(target, data, output, max_steps=2, save_steps=1, draft_vocab_size=12, **chosen)


def edit(file: Path, **changes: object) -> None:
    content = json.loads(file.read_text())
    for path, value in changes.items():
        *parents, last = path.split("__")
        place = content
        for name in parents:
            place = place[name]
        place[last] = value
    file.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("seed", 2**63), ("threads", 10**9), ("num_gpu", 10**5), ("device", "tpu"), ("eagle_num_layers", 10**7),
        ("draft_window", 10**30), ("medusa_num_heads", 10**7),
    ],
)  # fmt: skip
def test_absurd_numbers_are_refused_at_once(option, value):
    group = HeadSettings if option in HeadSettings.model_fields else RunSettings
    mode = {"mode": "medusa"} if option == "medusa_num_heads" else {}
    with pytest.raises(ConfigError, match=option):
        group(**{option: value}, **mode)


def test_settings_that_contradict_each_other_are_named_without_all_the_others():
    with pytest.raises(ConfigError, match=r"^LossSettings: loss_mix 'half': expected adaptive, alpha or a number"):
        LossSettings(loss_mix="half")


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(ConfigError, match="this machine has 2 GPUs"):
        _check_devices(RunSettings(num_gpu=3))
    _check_devices(RunSettings(num_gpu=2))
    _check_devices(RunSettings(num_gpu=3, device="cpu"))


def test_a_user_that_does_not_exist_is_named(pair, run):
    with pytest.raises(ConfigError, match="no user 'no-such-user'"):
        user_path("~no-such-user/data")
    answer = run("train", pair.target, "--data", "~no-such-user/data", "--taps", TAPS)
    assert answer.code == 2
    assert "no user" in answer.err


def test_a_name_that_is_too_long_is_named(pair, run, data):
    name = "x" * 300
    answer = run("train", pair.target, "--data", str(data), "--taps", TAPS, "--output-dir", name)
    assert answer.code == 2
    assert name in answer.err


@pytest.mark.parametrize("held_out", ["absent.jsonl", "{target}", "{target}/config.json"])
def test_prompts_to_judge_by_are_read_before_anything_is_trained(pair, data, tmp_path, run, held_out):
    given = ["--taps", TAPS, "--eval-data", held_out.format(target=pair.target), "--output-dir", str(tmp_path / "out")]
    answer = run("train", pair.target, "--data", str(data), *given)
    assert answer.code == 2
    assert answer.err.startswith("error:")
    assert not (tmp_path / "out").exists()


def test_training_that_diverges_ends_with_an_error_and_keeps_what_was_saved(pair, data, tmp_path):
    with pytest.raises(SametokenError, match=r"step 2: the norm of the gradients is .* an --lr below 1e\+30"):
        train_tiny(pair.target, data, tmp_path, lr=1e30, warmup_steps=0, max_steps=9, save_steps=1)
    assert (tmp_path / "checkpoint-1" / "manifest.json").exists()


@pytest.mark.parametrize("content", ["a diary\n", "[1]\n", '{"step": "one"}\n', DEEP + "\n"])
def test_a_log_that_is_no_log_stays_as_it_is(pair, data, tmp_path, content):
    log = tmp_path / "log.jsonl"
    log.write_text(content)
    with pytest.raises(DataError, match="line 1 is not of the log of a run"):
        train_tiny(pair.target, data, tmp_path)
    assert log.read_text() == content


def test_a_torn_line_of_the_log_is_cut_off(pair, data, again):
    log = again / "log.jsonl"
    before = log.read_bytes()
    log.write_bytes(before + b'{"step": 3, "lo\xff')
    go_on(pair.target, data, again)
    assert log.read_bytes() == before


@pytest.mark.parametrize(
    "change",
    [{"progress__step": "two"}, {"progress__step": 10**30}, {"progress__step": -1}, {"progress__best": "much"},
     {"progress__ended": 0}, {"progress": {}}, {"progress": None}],
    ids=str,
)  # fmt: skip
def test_progress_that_cannot_be_true_is_refused(pair, data, again, change):
    edit(again / "checkpoint-2" / "manifest.json", **change)
    with pytest.raises(SametokenError, match="not the manifest of a checkpoint"):
        go_on(pair.target, data, again)


def test_json_of_a_hundred_thousand_brackets_is_refused(pair, data, again, tmp_path):
    (again / "checkpoint-2" / "manifest.json").write_text(DEEP)
    with pytest.raises(SametokenError, match="not JSON"):
        go_on(pair.target, data, again)
    file = tmp_path / "deep.json"
    file.write_text(DEEP)
    with pytest.raises(ConfigError, match="not JSON"):
        train_tiny(pair.target, data, tmp_path / "out", eagle_config=str(file))


@pytest.mark.parametrize(
    ("change", "named"),
    [({"origin__target_digest": 5}, "target_digest"), ({"origin__vocab_size": "x"}, "vocab_size"),
     ({"counts__tokens": None}, "tokens"), ({"origin__draft_vocab_size": None}, "draft_vocab_size")],
    ids=str,
)  # fmt: skip
def test_an_edited_manifest_of_samples_is_refused(again, change, named):
    edit(again / "data" / "manifest.json", **change)
    with pytest.raises(DataError, match=f"not a manifest of prepared samples .*{named}"):
        read_manifest(again / "data")


def test_two_runs_do_not_share_a_directory(pair, data, again):
    other = os.open(again, os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="is being written by another process"):
            go_on(pair.target, data, again)
    finally:
        os.close(other)
    go_on(pair.target, data, again)


@pytest.mark.parametrize(
    ("command", "given", "message"),
    [
        ("prepare", ["--chat-template-kwargs", DEEP], "expected an object"),
        ("prepare", ["--chat-template-kwargs", '{"messages": []}'], "messages comes from the data"),
        ("prepare", ["--chat-template-kwargs", '{"add_generation_prompt": true}'], "comes from the data"),
        ("prepare", ["--show", str(10**30)], "at most"),
        ("prepare", ["--taps", "0"], "--taps is for hidden states"),
        ("prepare", ["--hidden-states", "--taps", "9" * 5000], "expected eagle3"),
        ("synthesize", ["--limit", str(10**30)], "at most"),
    ],
)
def test_preparing_refuses_in_one_line_and_writes_nothing(pair, data, tmp_path, run, command, given, message):
    output = tmp_path / "out"
    answer = run(command, pair.target, "--data", str(data), "--output", str(output), *given)
    assert answer.code == 2
    assert message in answer.err
    assert len(answer.err.strip().splitlines()) == 1
    assert not (output / "hidden").exists()


def test_a_shard_has_no_more_lines_than_a_machine_can_count(data, tmp_path, run):
    given = ["--input-path", str(data), "--output-dir", str(tmp_path), "--max-lines-per-shard", str(10**30)]
    answer = run("shard", *given)
    assert answer.code == 2
    assert "at most" in answer.err


@pytest.mark.parametrize(
    ("given", "message"),
    [(["--threads", "0"], "expected 1 to 1024"), (["--ar-lower-bound", "nan"], "expected a finite number"),
     (["--write-tree", "0"], "expected at least 1")],
    ids=str,
)  # fmt: skip
def test_evaluating_refuses_numbers_without_a_meaning(pair, data, run, given, message):
    answer = run("evaluate", pair.draft, "--target", pair.target, "--data", str(data), *given)
    assert answer.code == 2
    assert message in answer.err


def test_a_missed_bound_leaves_one_json_object(pair, data, run):
    few = ["--num-samples", "1", "--osl", "4", "--threads", "1", "--json", "--ar-lower-bound", "99"]
    answer = run("evaluate", pair.draft, "--target", pair.target, "--data", str(data), *few)
    assert answer.code == 1
    assert json.loads(answer.out)["acceptance_length"] < 99
    assert "below --ar-lower-bound" in answer.err


@pytest.mark.thorough
def test_an_error_of_several_processes_is_no_traceback(pair, tmp_path, run, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    given = ["--num-gpu", "2", "--device", "cpu", "--threads", "1", "--taps", TAPS, "--output-dir", str(tmp_path)]
    answer = run("train", pair.target, "--data", str(tmp_path / "absent.jsonl"), *given)
    assert answer.code == 2
    assert "absent.jsonl: No such file" in answer.err
    assert "Traceback" not in answer.err
