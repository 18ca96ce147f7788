"""`sametoken export` and `sametoken doctor` as a user meets them, with heads of a tiny target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cli_checks import Pair
from head_checks import eagle_config, random_weights, shape_of
from head_files import read_files
from sametoken.check.diagnosis import Reading, ReadingResult, advise
from sametoken.heads.eagle.module import EagleHead
from sametoken.heads.medusa.config import MedusaConfig
from sametoken.heads.medusa.module import MedusaHeads
from sametoken.heads.read import read_head
from sametoken.heads.write import write_head

IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def heads(tiny_pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of heads for the tiny target, by kind."""
    root, target = tmp_path_factory.mktemp("heads"), shape_of(tiny_pair.target)
    for name, options in {
        "eagle3": {"draft_vocab_size": 50},
        "eagle3.1": {"fc_norm": True, "norm_output": True},
        "residual": {"norm_before_residual": True},
        "eagle": {"version": 1, "size": target.hidden_size},
    }.items():
        head = EagleHead(eagle_config(target, **options), torch.float32)
        random_weights(head)
        write_head(head, root / name, target, target_name=tiny_pair.target)
    medusa = MedusaHeads(MedusaConfig(2, 1, target.hidden_size, target.vocab_size), torch.float32)
    random_weights(medusa)
    write_head(medusa, root / "medusa", target, target_name=tiny_pair.target)
    return root


@pytest.fixture
def foreign(heads: Path, tmp_path: Path) -> Path:
    """The EAGLE-3 head as SpecForge would have written it: nobody says what its ids count."""
    config, _ = read_files(heads / "eagle3")
    del config["sametoken"], config[IDS]
    config["eagle_config"] = {IDS: [0, 1]}
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "config.json").write_text(json.dumps(config))
    (tmp_path / "foreign" / "model.safetensors").write_bytes((heads / "eagle3" / "model.safetensors").read_bytes())
    return tmp_path / "foreign"


# export


def export(run: Any, pair: Pair, head: Path, output: Path, *more: str) -> Any:
    return run("export", str(head), "--target", pair.target, "--output", str(output), *more)


def test_export_writes_what_reads_back(run: Any, pair: Pair, heads: Path, tmp_path: Path) -> None:
    answer = export(run, pair, heads / "eagle3", tmp_path / "out", "--to", "trtllm")
    assert answer.code == 0, answer.err
    assert "the head for TensorRT-LLM, float32" in answer.out
    assert "eagle3_layers_to_capture: [0, 1]" in answer.out
    target = shape_of(pair.target)
    places = heads / "eagle3", tmp_path / "out"
    first, second = (read_head(place, target, torch.float32, "cpu", pack=False).module for place in places)
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, second.get_parameter(name))


def test_export_to_another_dtype_and_other_layers(run: Any, pair: Pair, heads: Path, tmp_path: Path) -> None:
    more = ("--dtype", "bfloat16", "--taps", "1,2")
    answer = export(run, pair, heads / "eagle3", tmp_path / "out", *more)
    assert answer.code == 0, answer.err
    config, tensors = read_files(tmp_path / "out")
    assert (config[IDS], config["eagle_config"][IDS], config["sametoken"]["taps"]) == ([2, 3], [1, 2], [1, 2])
    assert config["torch_dtype"] == "bfloat16"
    assert {t.dtype for t in tensors.values() if t.is_floating_point()} == {torch.bfloat16}


def test_export_says_what_was_assumed(run: Any, pair: Pair, foreign: Path, tmp_path: Path) -> None:
    config = json.loads((foreign / "config.json").read_text())
    config["eagle_config"] = {IDS: [1, 2]}
    (foreign / "config.json").write_text(json.dumps(config))
    assumed = "assumed: taps [1, 2]"
    assert assumed in export(run, pair, foreign, tmp_path / "out").out
    assert assumed not in export(run, pair, foreign, tmp_path / "out", "--taps", "1,2").out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("residual", "--to", "sglang"), ["SGLang", "norm_before_residual"]),
        (("residual", "--to", "trtllm"), ["TensorRT-LLM", "norm_before_residual"]),
        (("medusa", "--to", "speculators"), ["speculators", "Medusa"]),
        (("eagle", "--to", "trtllm"), ["TensorRT-LLM", "EAGLE-1"]),
        (("eagle3", "--to", "vlm"), ["did you mean 'vllm'"]),
        (("eagle3", "--taps", "one"), ["--taps 'one'"]),
        (("eagle3", "--taps", "1,2,0"), ["expected 2 layers"]),
        (("eagle3", "--taps", "1,9"), ["blocks from 0 to 2"]),
        (("eagle", "--taps", "1"), ["only EAGLE-3 has taps"]),
        (("eagle3", "--dtype", "float8"), ["valid: bfloat16, float16, float32"]),
    ],
)
def test_export_refuses(
    run: Any, pair: Pair, heads: Path, tmp_path: Path, arguments: tuple[str, ...], words: list[str]
) -> None:
    answer = export(run, pair, heads / arguments[0], tmp_path / "out", *arguments[1:])
    assert (answer.code, answer.out) == (2, "")
    assert all(word in answer.err for word in words), answer.err
    assert not (tmp_path / "out").exists()


def test_export_shows_its_progress_on_a_terminal(
    run: Any, pair: Pair, heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert export(run, pair, heads / "eagle3", tmp_path / "quiet").err == ""
    target, arrived = shape_of(pair.target), []
    read_head(heads / "eagle3", target, torch.float32, "cpu", pack=False, arrived=lambda: arrived.append(1))
    tensors = len(read_files(heads / "eagle3")[1])
    assert len(arrived) == tensors
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    answer = export(run, pair, heads / "eagle3", tmp_path / "shown")
    assert answer.code == 0
    assert f"{tensors + 1}/{tensors + 1}" in answer.err
    assert "the head for" in answer.out


def test_export_needs_a_target_and_a_place(run: Any, pair: Pair, heads: Path, tmp_path: Path) -> None:
    assert "--target is missing" in run("export", str(heads / "eagle3"), "--output", str(tmp_path / "out")).err
    assert "--output is missing" in run("export", str(heads / "eagle3"), "--target", pair.target).err


def test_export_keeps_what_is_there(run: Any, pair: Pair, heads: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    answer = export(run, pair, heads / "eagle3", tmp_path)
    assert answer.code == 2
    assert "thesis.txt" in answer.err
    assert export(run, pair, heads / "eagle3", tmp_path, "--force").code == 0
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


# doctor


def examine(run: Any, pair: Pair, head: Path, *more: str) -> dict[str, Any]:
    answer = run("doctor", str(head), "--target", pair.target, "--json", *more)
    assert answer.code == 0, answer.err
    found: dict[str, Any] = json.loads(answer.out)
    return found


@pytest.mark.parametrize(
    ("name", "kind", "engines"),
    [
        ("eagle3", "EAGLE-3", {"vLLM", "SGLang", "TensorRT-LLM", "speculators"}),
        ("eagle3.1", "EAGLE-3.1", {"vLLM", "SGLang", "TensorRT-LLM", "speculators"}),
        ("residual", "EAGLE-3", {"vLLM", "speculators"}),
        ("eagle", "EAGLE-1 (also EAGLE-2's)", {"vLLM", "SGLang"}),
        ("medusa", "Medusa", {"vLLM"}),
    ],
)
def test_doctor_names_kind_and_engines(
    run: Any, pair: Pair, heads: Path, name: str, kind: str, engines: set[str]
) -> None:
    found = examine(run, pair, heads / name, "--no-measure")
    assert (found["kind"], found["producer"], found["acceptance"]) == (kind, "sametoken", [])
    assert {engine for engine, reasons in found["engines"].items() if not reasons} == engines


def test_doctor_tells_the_drafts_rotation_from_the_targets(run: Any, pair: Pair, heads: Path) -> None:
    facts = examine(run, pair, heads / "eagle3", "--no-measure")["facts"]
    assert facts["rotation"].startswith("theta 500, ")
    assert facts["the target's"].startswith("theta 10000, ")
    assert facts["vocabulary"] == "50 of 128 tokens"


def test_doctor_shows_tables(run: Any, pair: Pair, heads: Path) -> None:
    answer = run("doctor", str(heads / "residual"), "--target", pair.target, "--no-measure")
    assert answer.code == 0
    for words in ("EAGLE-3", "sametoken", "norm_before_residual", "TensorRT-LLM"):
        assert words in answer.out


def test_doctor_measures_both_readings_of_a_foreign_head(run: Any, pair: Pair, heads: Path, foreign: Path) -> None:
    config = json.loads((foreign / "config.json").read_text())
    config["eagle_config"] = {IDS: [1, 2]}
    (foreign / "config.json").write_text(json.dumps(config))
    found = examine(run, pair, foreign, "--num-prompts", "2", "--max-tokens", "8", "--max-draft-len", "2")
    assert [item["reading"]["taps"] for item in found["acceptance"]] == [[1, 2], [0, 1]]
    assert any("assumed" in note for note in found["notes"])
    for item in found["acceptance"]:
        assert 1 <= item["length"] <= 3
        assert 0 <= item["covered"] <= 1
    own = examine(run, pair, heads / "eagle3", "--num-prompts", "2", "--max-tokens", "8", "--max-draft-len", "2")
    (measured,) = own["acceptance"]
    other = {tuple(item["reading"]["taps"]): item for item in found["acceptance"]}[(0, 1)]
    assert (measured["length"], measured["rate"]) == (other["length"], other["rate"])


@pytest.mark.parametrize("name", ["eagle", "medusa"])
def test_doctor_measures_heads_without_taps(run: Any, pair: Pair, heads: Path, name: str) -> None:
    answer = run("doctor", str(heads / name), "--target", pair.target, "--num-prompts", "1", "--max-tokens", "4")
    assert answer.code == 0, answer.err
    assert "acceptance length" in answer.out
    assert "over 1 prompts" in answer.out


def test_advice_says_which_reading_is_meant_only_where_one_is_clearly_better() -> None:
    first, other = Reading((1, 2), "as read"), Reading((0, 1), "if the ids counted blocks before")

    def words(a: float, b: float) -> str:
        return advise([ReadingResult(first, a, 0.1, 1.0), ReadingResult(other, b, 0.1, 1.0)]) or ""

    assert advise([ReadingResult(first, 2.0, 0.1, 1.0)]) is None
    assert "does not decide" in words(2.0, 2.05)
    assert "does not decide" in words(2.05, 2.0)
    assert "layers 1, 2 are meant" in words(2.4, 1.1)
    assert "2.40 against 1.10" in words(1.1, 2.4)
    assert "--taps 0,1" in words(1.1, 2.4)


def test_doctor_refuses_what_is_no_head_of_this_target(run: Any, pair: Pair, heads: Path, tmp_path: Path) -> None:
    assert "--target is missing" in run("doctor", str(heads / "eagle3")).err
    answer = run("doctor", str(heads / "eagle3"), "--target", "embedded", "--no-measure")
    assert answer.code == 2
    assert "128" in answer.err
    answer = run("doctor", pair.target, "--target", pair.target)
    assert answer.code == 2
    assert "expected a head (EAGLE-1, EAGLE-3 or Medusa)" in answer.err
