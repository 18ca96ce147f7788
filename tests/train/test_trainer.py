"""Whole runs of training on a tiny target: what they write, and that interrupting them changes nothing."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sametoken.checkpoint.hub import read_config
from sametoken.checkpoint.identity import model_digest
from sametoken.checkpoint.load import load_decoder
from sametoken.checkpoint.tokenizer_files import load_tokenizer
from sametoken.errors import CheckpointError, ConfigError, DataError, SametokenError
from sametoken.files import write_tensors
from sametoken.heads.read import read_head
from sametoken.model.config import ModelConfig
from sametoken.train.checkpoints import all_checkpoints
from sametoken.train.dataset.extraction import extract, run_here, spec_of
from sametoken.train.dataset.preparation import data_digest, prepare
from sametoken.train.dataset.prepared import Origin
from training_checks import TAPS, log_of, train_tiny, write_conversations

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_conversations(tmp_path_factory.mktemp("data") / "chat.jsonl")


def files_of(directory: Path) -> dict[str, str]:
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(directory.iterdir()) if f.is_file()}


class Stop(Exception):  # noqa: N818
    """What interrupts a run in a test."""


def stopping_at(step: int):
    def tell(line: str) -> None:
        if line.startswith(f"step {step}/"):
            raise Stop

    return tell


def test_a_run_learns_and_leaves_the_target_as_it_was(pair, data, tmp_path, curves):
    before = files_of(Path(pair.target))
    outcome = train_tiny(pair.target, data, tmp_path / "out", max_steps=40, num_epochs=100, save_steps=40)
    assert files_of(Path(pair.target)) == before
    log = log_of(tmp_path / "out")
    assert log[-1]["loss"] < 0.7 * log[0]["loss"]
    assert log[-1]["accuracy"][0] > 2 * log[0]["accuracy"][0]
    assert outcome.steps == 40
    target = ModelConfig.from_hf(read_config(Path(pair.target)))
    head = read_head(outcome.head, target, torch.float32, "cpu", pack=False).module
    stored = load_file(tmp_path / "out" / "checkpoint-40" / "model.safetensors")
    for name, parameter in head.named_parameters():
        torch.testing.assert_close(parameter.data, stored[f"head.{name}"], atol=0, rtol=0)
    assert (tmp_path / "out" / "curves.png").stat().st_size > 1000
    assert list((tmp_path / "out" / "tensorboard").iterdir())


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.thorough),
        {"mode": "eagle1"},
        pytest.param({"optim": "muon"}, marks=pytest.mark.thorough),
    ],
)  # eagle1 draws noise
def test_interrupted_and_resumed_equals_uninterrupted(pair, data, tmp_path, options):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train_tiny(pair.target, data, whole, num_epochs=5, **options)
    with pytest.raises(Stop):
        train_tiny(pair.target, data, parts, tell=stopping_at(4), num_epochs=5, **options)
    assert [path.name for path in all_checkpoints(parts)] == ["checkpoint-3"]
    outcome = train_tiny(pair.target, data, parts, num_epochs=5, **options)
    assert outcome.steps == 6
    for name in ("checkpoint-6", "head"):
        assert files_of(parts / name) == files_of(whole / name)
    assert [entry["step"] for entry in log_of(parts)] == [2, 4, 6]
    assert log_of(parts)[0]["loss"] == log_of(whole)[0]["loss"]


def test_noise_disturbs_what_eagle1_reads(pair, data, tmp_path):
    losses = []
    for width in (0.0, 0.2, 2.0):
        train_tiny(pair.target, data, tmp_path / str(width), mode="eagle1", noise=width, max_steps=1)
        losses.append(log_of(tmp_path / str(width))[0]["loss"])
    assert abs(losses[2] - losses[0]) > abs(losses[1] - losses[0]) > 0


DRAWING = {
    "eagle1": ("--mode", "eagle1", "--noise", "2", "--ttt-steps", "3"),
    "draft": ("--mode", "draft", "--on-policy", "0.7", "--loss", "lk"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["draft", "eagle1"])
def test_draws_do_not_depend_on_how_a_step_is_cut(pair, data, tmp_path, run, mode):
    """One process with four rows, two with two each, and four forwards of one row train the same."""
    common = ["train", pair.target, "--data", str(data), *DRAWING[mode], "--lr", "3e-3", "--optim", "adamw",
              "--training-seq-len", "64", "--max-steps", "4", "--num-epochs", "5", "--loss-decay", "0.8"]  # fmt: skip
    cuts = {
        "rows": ("--train-bs", "4", "--threads", "1"),
        "processes": ("--train-bs", "2", "--num-gpu", "2"),
        "forwards": ("--train-bs", "1", "--gradient-accumulation-steps", "4", "--threads", "1"),
    }
    for name, cut in cuts.items():
        done = run(*common, *cut, "--output-dir", str(tmp_path / name))
        assert done.code == 0, done.err
    whole, *others = ([entry["loss"] for entry in log_of(tmp_path / name)] for name in cuts)
    for each in others:
        assert each == pytest.approx(whole, rel=1e-4)


def test_gradient_accumulation_and_checkpointing_change_no_more_than_rounding(pair, data, tmp_path):
    one = train_tiny(pair.target, data, tmp_path / "one", train_bs=2, num_epochs=5)
    two = train_tiny(
        pair.target, data, tmp_path / "two", gradient_accumulation_steps=2, gradient_checkpointing=True, num_epochs=5
    )
    first, second = (load_file(each.head / "model.safetensors") for each in (one, two))
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, atol=2e-4, rtol=1e-3)


def test_hidden_states_on_disk_train_the_same_head_as_the_target_itself(pair, data, tmp_path):
    target = Path(pair.target)
    tokenizer, config = load_tokenizer(target), ModelConfig.from_hf(read_config(target))
    origin = Origin("tiny", model_digest(target), tokenizer.digest(), data_digest([data]), config.vocab_size, 128)
    prepared = prepare([data], tmp_path / "prepared", tokenizer, origin)
    online = train_tiny(pair.target, prepared.directory, tmp_path / "online", dtype="float32")
    decoder = load_decoder(target, torch.float32, "cpu")
    spec = spec_of(prepared, decoder.config.hidden_size, decoder.dtype, (0, 1, 2), "bfloat16")
    extract(prepared, run_here(prepared, decoder, spec.taps), spec)
    offline = train_tiny(pair.target, prepared.directory, tmp_path / "offline", dtype="float32")
    logs = [log_of(tmp_path / name) for name in ("online", "offline")]
    for a, b in zip(*logs, strict=True):  # hidden states on disk are rounded to bfloat16
        assert a["loss"] == pytest.approx(b["loss"], rel=0.02)
    assert online.steps == offline.steps
    with pytest.raises(DataError, match=r"hidden states of blocks \(0, 1, 2\), expected \(0, 2, 1\)"):
        train_tiny(pair.target, prepared.directory, tmp_path / "other", taps="0,2,1")
    with pytest.raises(ConfigError, match="--draft-vocab-size has no use"):
        train_tiny(pair.target, prepared.directory, tmp_path / "other", draft_vocab_size=20)
    with pytest.raises(DataError, match="prepared for tiny"):
        train_tiny(pair.draft, prepared.directory, tmp_path / "other")


@pytest.mark.parametrize(
    "chosen",
    [
        {"mode": "medusa"},
        {"mode": "medusa", "medusa_num_heads": 3, "medusa_num_layers": 2, "medusa_own_heads": False},
        {"mode": "eagle1", "fc_bias": True, "eagle_num_layers": 2, "noise": 0.0},
        {"mode": "eagle", "fc_norm": True, "norm_output": True, "draft_window": 8, "loss": "lk", "loss_mean": "token"},
        {"draft_vocab_size": 12, "norm_before_residual": True, "norm_before_fc": True, "loss": "tv"},
    ],
    ids=str,
)
def test_every_kind_of_head_trains_and_is_read_again(pair, data, tmp_path, chosen):
    outcome = train_tiny(pair.target, data, tmp_path / "out", **chosen)
    target = ModelConfig.from_hf(read_config(Path(pair.target)))
    found = read_head(outcome.head, target, torch.float32, "cpu", pack=False)
    log = log_of(tmp_path / "out")
    assert log[-1]["loss"] < log[0]["loss"]
    kind = "medusa" if chosen.get("mode") == "medusa" else "eagle1" if chosen.get("mode") == "eagle1" else "eagle3"
    assert kind == ("medusa" if not hasattr(found.config, "version") else f"eagle{found.config.version}")
    if "draft_vocab_size" in chosen:
        assert len(found.module.d2t) == 12


def test_starting_from_a_head_keeps_what_it_knows(pair, data, tmp_path):
    first = train_tiny(pair.target, data, tmp_path / "first", max_steps=30, num_epochs=100)
    again = train_tiny(pair.target, data, tmp_path / "again", init_from=str(first.head))
    assert log_of(tmp_path / "again")[0]["loss"] < 0.8 * log_of(tmp_path / "first")[0]["loss"]
    assert again.steps == 6
    with pytest.raises(ConfigError, match=r"has --taps \(0, 1, 2\), got \(0, 2, 1\)"):
        train_tiny(pair.target, data, tmp_path / "other", taps="0,2,1", init_from=str(first.head))
    heads = train_tiny(pair.target, data, tmp_path / "heads", mode="medusa", medusa_num_heads=3, max_steps=1)
    with pytest.raises(ConfigError, match="has --medusa-num-heads 3, got 2"):
        train_tiny(pair.target, data, tmp_path / "other", mode="medusa", init_from=str(heads.head))
    with pytest.raises(ConfigError, match="is of kind eagle3, but --mode is medusa"):
        train_tiny(pair.target, data, tmp_path / "other", mode="medusa", init_from=str(first.head))


def test_the_best_head_by_held_out_evaluation_is_kept_and_training_ends_when_it_gets_no_better(pair, data, tmp_path):
    evaluated: list[Path] = []

    def evaluator(head: Path) -> float:
        evaluated.append(head)
        return (1.5, 2.5, 2.0, 1.0, 3.0)[len(evaluated) - 1]

    chosen = {"max_steps": 20, "num_epochs": 100, "save_steps": 1, "save_total_limit": 30, "eval_data": "unread",
              "eval_steps": 2, "patience": 2}  # fmt: skip
    outcome = train_tiny(pair.target, data, tmp_path / "out", evaluator=evaluator, **chosen)
    assert (outcome.best, outcome.steps, outcome.stopped_early) == (2.5, 8, True)
    best = load_file(tmp_path / "out" / "checkpoint-4" / "model.safetensors")["head.fc.weight"]
    assert torch.equal(load_file(outcome.head / "model.safetensors")["fc.weight"], best)
    assert [e["eval_acceptance_length"] for e in log_of(tmp_path / "out") if "eval_acceptance_length" in e] == [
        1.5, 2.5, 2.0, 1.0
    ]  # fmt: skip
    again = train_tiny(pair.target, data, tmp_path / "out", evaluator=evaluator, **chosen)
    assert again.steps == 8  # it had ended


def test_refuses_to_go_on_with_other_settings_or_from_damaged_files(pair, data, tmp_path):
    train_tiny(pair.target, data, tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"checkpoint-6: trained with lr = 0.003, expected 0.001"):
        train_tiny(pair.target, data, tmp_path / "out", lr=0.001)
    with pytest.raises(SametokenError, match="holds checkpoints of an earlier run"):
        train_tiny(pair.target, data, tmp_path / "out", resume=False)
    weights = tmp_path / "out" / "checkpoint-6" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"model.safetensors: found \d+ bytes, expected \d+"):
        train_tiny(pair.target, data, tmp_path / "out")
    manifest = tmp_path / "out" / "checkpoint-6" / "manifest.json"
    manifest.write_text(manifest.read_text()[:40])
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        train_tiny(pair.target, data, tmp_path / "out")


STRANGE_STATES = {
    "no state": lambda found: found.clear(),
    "one state less": lambda found: found.pop(min(found)),
    "one state more": lambda found: found.update({"none.weight/exp_avg": torch.zeros(2)}),
    "another shape": lambda found: found.update({min(found): torch.zeros(3, 5, 7)}),
    "integers": lambda found: found.update({min(found): torch.zeros_like(found[min(found)], dtype=torch.int64)}),
    "no numbers": lambda found: found.update({min(found): torch.full_like(found[min(found)], float("nan"))}),
}


@pytest.mark.parametrize("file", ["optimizer.safetensors", "model.safetensors"])
@pytest.mark.parametrize("strange", STRANGE_STATES)
def test_states_of_strangers_with_digests_that_fit_are_one_error(pair, data, tmp_path, strange, file):
    with pytest.raises(Stop):
        train_tiny(pair.target, data, tmp_path / "out", save_steps=3, tell=stopping_at(4))
    place = tmp_path / "out" / "checkpoint-3"
    states = load_file(place / file)
    STRANGE_STATES[strange](states)
    manifest = json.loads((place / "manifest.json").read_text())
    manifest["files"][file] = write_tensors(place / file, states)._asdict()
    (place / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"checkpoint-3: .*; delete ") as told:
        train_tiny(pair.target, data, tmp_path / "out", save_steps=3)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("sharded", [(), pytest.param(("--fsdp",), marks=pytest.mark.thorough)])
def test_two_processes_equal_one_at_the_same_global_batch(pair, data, tmp_path, run, sharded):
    common = ["train", pair.target, "--data", str(data), "--taps", TAPS, "--ttt-steps=3", "--lr", "3e-3",
              "--training_seq_len=128", "--max_steps", "4", "--num_epochs", "5"]  # fmt: skip
    one = run(*common, "--output_dir", str(tmp_path / "one"), "--train_bs", "2", "--threads", "1")
    two = run(*common, "--output_dir", str(tmp_path / "two"), "--train_bs", "1", "--num_gpu", "2", *sharded)
    assert (one.code, two.code) == (0, 0), (one.err, two.err)
    first, second = (load_file(tmp_path / name / "head" / "model.safetensors") for name in ("one", "two"))
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, atol=1e-4, rtol=1e-3)
    for a, b in zip(*(log_of(tmp_path / name) for name in ("one", "two")), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4)


def test_a_checkpoint_of_two_processes_serves_one(pair, data, tmp_path):
    """States are whole, so the number of processes may change between runs; here one saves and one with less rows."""
    train_tiny(pair.target, data, tmp_path / "out", train_bs=2, max_steps=6, num_epochs=9)
    with pytest.raises(CheckpointError, match="rows_per_step = 2, expected 1"):
        train_tiny(pair.target, data, tmp_path / "out", train_bs=1, max_steps=6, num_epochs=9)
    settings = json.loads((tmp_path / "out" / "checkpoint-6" / "manifest.json").read_text())["settings"]
    assert "num_gpu" not in settings
