"""Recipes of `sametoken train`: our keys and Model Optimizer's, overrides, refusals, and the plan of --dry-run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from training_checks import MODELOPT_RECIPE, TAPS, write_conversations

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_conversations(tmp_path_factory.mktemp("data") / "chat.jsonl")


def recipe(tmp_path: Path, text: str) -> str:
    (tmp_path / "recipe.yaml").write_text(text)
    return str(tmp_path / "recipe.yaml")


def plan(run, *arguments: str) -> dict:
    done = run("train", *arguments, "--dry-run", "--json")
    assert done.code == 0, done.err
    return json.loads(done.out)


def test_a_recipe_of_model_optimizer_is_read_as_it_is(pair, data, tmp_path, run):
    given = [
        "--config",
        recipe(tmp_path, MODELOPT_RECIPE),
        f"model.model_name_or_path={pair.target}",
        f"data.data_path={data}",
    ]
    made = plan(run, *given, "--logging-steps", "3")
    settings = {name: each["value"] for name, each in made["settings"].items()}
    expected = {
        "model": pair.target, "data": str(data), "mode": "eagle3", "num_epochs": 1.0, "train_bs": 2, "lr": 1e-3,
        "warmup_steps": 1, "training_seq_len": 128, "save_steps": 50, "all_tokens": True, "do_eval": False,
        "lr_scheduler_type": "linear", "dtype": "bfloat16", "ttt_steps": 2, "loss_decay": 0.9, "loss": "kl",
        "logging_steps": 3,
    }  # fmt: skip
    assert {name: settings[name] for name in expected} == expected
    origins = {name: each["origin"] for name, each in made["settings"].items()}
    file = str(tmp_path / "recipe.yaml")
    assert origins["lr"] == f"{file}: training.learning_rate"
    assert origins["data"] == f"data.data_path={data}"
    assert origins["logging_steps"] == "command line"
    assert origins["optim"] == "chosen for this run"
    assert origins["seed"] == "default"
    assert (made["samples"], made["steps"]) == (24, 6)
    assert not (Path.cwd() / "sametoken-head").exists()


def test_the_plan_is_the_run(pair, data, tmp_path, run):
    given = ["--config", recipe(tmp_path, MODELOPT_RECIPE), pair.target, f"data={data}", f"taps={TAPS}"]
    given += ["eagle.eagle_architecture_config.intermediate_size=96", f"training.output_dir={tmp_path / 'out'}"]
    printed = run("train", *given, "--dry-run")
    assert printed.code == 0, printed.err
    assert "24 samples" in printed.out
    assert "6 steps; nothing was trained" in printed.out
    assert not (tmp_path / "out").exists()
    done = run("train", *given, "--threads=1", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["steps"] == 6
    assert json.loads((tmp_path / "out" / "head" / "config.json").read_text())["intermediate_size"] == 96


def test_our_keys_are_read_flat_and_in_sections_and_words_win(pair, data, tmp_path, run):
    text = f"model: {pair.target}\ndata: {data}\nmode: medusa\nmedusa: {{medusa-num-heads: 3}}\nlr: 1e-2\n"
    text = text.replace("medusa-num-heads", "medusa_num_heads")
    made = plan(run, "--config", recipe(tmp_path, text), "training.lr=2e-2", "num-epochs=2", "max_steps=-1")["settings"]
    found = [made[name]["value"] for name in ("mode", "medusa_num_heads", "lr", "num_epochs", "max_steps")]
    assert found == ["medusa", 3, 0.02, 2.0, None]
    assert plan(run, pair.target, f"data={data}", "lr=3e-3", "--lr", "4e-3")["settings"]["lr"]["value"] == 4e-3


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("lr: 1", ["training.learnig_rate=1"], "unknown key 'learnig_rate'; did you mean 'lr'?"),
        ("training: {num_epoch: 1}", [], "recipe.yaml: training.num_epoch: unknown key 'num_epoch'; did you mean"),
        ("eagle: {eagle_tt_steps: 1}", [], "did you mean 'eagle_ttt_steps'"),
        ("dflash: {dflash_block_size: 8}", [], "a recipe for dflash, which cannot be trained here; kinds that can:"),
        ("dflash: {dflash_architecture_config: {projector_type: dspark}}", [], "a recipe for dspark"),
        ("metadata: {recipe_type: speculative_dflash}", [], "a recipe for dflash"),
        ("metadata: {recipe_type: ptq}", [], "expected speculative_ with one of eagle3, eagle"),
        ("training: {cp_size: 2}", [], "training.cp_size is 2: rows are not divided"),
        ("data: {streaming_server_url: http://n}", [], "use `sametoken prepare --hidden-states --url`"),
        ("training: {learning_rate: fast}", [], "training.learning_rate is 'fast', expected a number"),
        ("training: {train_bs: 1.5}", [], "training.train_bs is 1.5, expected an integer"),
        ("training: {answer_only_loss: 3}", [], "answer_only_loss is 3, expected true or false"),
        ("train_bs: 0", [], "--train-bs = 0: expected a value greater"),
        ("mode: eagle1\nmedusa: {medusa_num_heads: 2}", [], "a section for medusa, but mode is 'eagle1'"),
        ("eagle: {eagle_decoder_type: kimik2}", [], "expected 'llama'"),
        ("- 1", [], "is a list, expected keys with values"),
        ("lr: 1\nlr: 2", [], "occurs twice"),
        ("lr: [", [], "is not YAML"),
        ("lr: 1\n# " + "x" * 2**18, [], "characters, expected at most 262144 of settings; is it another file?"),
        ("&a\nmode: eagle3\nmodel: *a", [], "a value contains itself"),
        ("lr: 1", ["optimiser.lr=1"], "unknown section 'optimiser'"),
        ("lr: 1", ["other"], "expected one model"),
        ("lr: 1", ["config=other.yaml"], "unknown key 'config'"),
    ],
    ids=lambda value: str(value)[:80],
)  # fmt: skip
def test_refusals_are_one_line(pair, data, tmp_path, run, text, words, message):
    done = run("train", pair.target, "--config", recipe(tmp_path, text), *words, "--data", str(data), "--dry-run")
    assert done.code == 2
    assert message in done.err
    assert len(done.err.strip().splitlines()) == 1


def test_an_absent_recipe_is_refused(pair, tmp_path, run):
    done = run("train", pair.target, "--config", str(tmp_path / "absent.yaml"))
    assert (done.code, len(done.err.strip().splitlines())) == (2, 1)
    assert "absent.yaml" in done.err
