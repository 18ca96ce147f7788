"""Heads trained as they are served in few bits: what is trained is what is written, read and computed.

Oracles: the formats' own rounding, the loader of quantised heads, and gradients by hand.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from cli_checks import call
from engine_checks import llama
from sametoken.checkpoint.hub import read_config
from sametoken.checkpoint.quantised.write import StoredFormat
from sametoken.errors import SametokenError, UnsupportedModelError
from sametoken.heads.modules import linears, round_linears
from sametoken.heads.objective import HeadObjective
from sametoken.heads.read import read_head
from sametoken.heads.registry import head_kind
from sametoken.learning.batch import Batch, guess_weights
from sametoken.learning.modes import TRAINED
from sametoken.learning.target import Features
from sametoken.model.config import ModelConfig
from sametoken.model.formats.base import signed_bytes
from sametoken.model.formats.rounding import ROUNDINGS
from sametoken.model.formats.straight import FakeRounding, straight
from sametoken.train.targets import read_outer
from training_checks import log_of, train_tiny, write_conversations

pytestmark = pytest.mark.usefixtures("one_thread")

FORMATS = ("fp8", "int8", "int4", "nvfp4", "mxfp4")
MODES: dict[str, dict[str, Any]] = {"eagle3": {}, "eagle1": {}, "medusa": {"medusa_num_heads": 2}}
SIZES = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 32,
         "num_key_value_heads": 2, "num_hidden_layers": 3, "max_position_embeddings": 256}  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return llama(tmp_path_factory.mktemp("target"), **SIZES)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_conversations(tmp_path_factory.mktemp("data") / "conversations.jsonl", 12)


def shape_of(target: str) -> ModelConfig:
    return ModelConfig.from_hf(read_config(Path(target)))


def plain(head: Path, target: str) -> dict[str, Tensor]:
    """What the loader reads, as plain numbers."""
    module = read_head(head, shape_of(target), torch.float32, "cpu", pack=False).module
    return dict(module.named_parameters())


def objective_of(target: str, mode: str, format: str | None, head: Path | None = None) -> HeadObjective:
    """A new head in training, or that of a directory."""
    trained = TRAINED[mode]
    made: type[HeadObjective] = trained.kind.load(trained.training.objective)
    outer = read_outer(Path(target), torch.float32, torch.device("cpu"))
    if head is None:
        options = trained.training.head(**{**MODES[mode], **({"taps": "0,1,2"} if mode == "eagle3" else {})})
        config = made.configure(options, shape_of(target), 128, {})
        module = made.create(config, outer.head, None, torch.Generator().manual_seed(3), std=0.1)
    else:
        module = read_head(head, shape_of(target), torch.float32, "cpu", pack=False).module
    return made(module, outer, trained.training.loss(quantize_aware=format), torch.float32)


def forward(objective: HeadObjective) -> Tensor:
    """The loss of a batch with random hidden states."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 128, (20,), generator=generator)
    batch = Batch.of([(tokens, tokens >= 0)])
    states = torch.randn(20, 128 * len(objective.taps), generator=generator)
    features = Features(states, torch.randn(20, 128, generator=generator))
    weighed = guess_weights(batch, objective.steps, 0.8, per_document=True)
    loss, _ = objective(batch, features, weighed.weights)
    return loss


class RoundedRows(FakeRounding):
    """The rows as the format rounds them, and the weight as it is."""

    def matrix(self, weight: Tensor) -> Tensor:
        return weight


def test_straight_through_gives_the_rounded_numbers_and_the_gradient_of_the_plain_ones() -> None:
    x = torch.tensor([0.3, 1.7, -2.4], requires_grad=True)
    found = straight(x, x.detach().round())
    assert found.tolist() == [0.0, 2.0, -2.0]
    (found * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("format", FORMATS)
def test_a_layer_computes_with_what_the_format_keeps(format: str) -> None:
    weight = torch.randn(16, 128, generator=torch.Generator().manual_seed(1)).requires_grad_()
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(2))
    fake, coded = FakeRounding(ROUNDINGS[format]), ROUNDINGS[format](weight.detach())
    fake.renew(weight)
    assert torch.equal(fake.matrix(weight), coded.dequantize())
    rows = fake.rows(x)
    if format == "int8":  # W8A8: products round their rows too
        codes, scale = signed_bytes(x)
        assert torch.equal(rows, codes * scale)
    else:
        assert torch.equal(rows, x)
    y = F.linear(rows, fake.matrix(weight))
    assert torch.allclose(y, coded.linear(x), atol=1e-4, rtol=1e-5)
    y.sum().backward()
    assert weight.grad is not None
    assert torch.allclose(weight.grad, rows.detach().sum(0).expand(16, 128), atol=1e-5)


@pytest.mark.cover
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("mode", MODES)
def test_the_loss_is_that_of_the_written_head(target: str, tmp_path: Path, mode: str, format: str) -> None:
    """A rounded forward in training is the plain forward of the quantised head as it is read, bit for bit."""
    objective = objective_of(target, mode, format)
    weights = {name: value.detach().clone() for name, value in objective.state_dict().items()}
    objective.write(tmp_path / "head", weights)
    assert "quantization_config" in json.loads((tmp_path / "head" / "config.json").read_text())
    trained = forward(objective)
    again = objective_of(target, mode, None, tmp_path / "head")
    for name, linear in linears(objective.head).items():
        assert torch.equal(linear.matrix, linears(again.head)[name].weight), name
    for linear in linears(again.head).values():
        linear.trained = RoundedRows(ROUNDINGS[format])  # the module that is read computes with plain rows
    assert torch.equal(trained, forward(again))
    trained.backward()
    for name, parameter in objective.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all()
    assert all(torch.equal(value, weights[name]) for name, value in objective.state_dict().items())


@pytest.mark.parametrize("format", ["int4", "nvfp4"])
def test_recomputing_activations_changes_nothing(target: str, format: str) -> None:
    kept, again = objective_of(target, "eagle3", format), objective_of(target, "eagle3", format)
    again.recompute = True
    for objective in (kept, again):
        forward(objective).backward()
    for one, other in zip(kept.parameters(), again.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("mode", MODES)
def test_a_run_writes_the_rounded_head(target: str, data: Path, tmp_path: Path, mode: str) -> None:
    """The best head is what `round_linears` makes of the float32 weights in the last checkpoint."""
    chosen = {**MODES[mode], "mode": mode, "quantize_aware": "int4", "quantize_group_size": 32}
    outcome = train_tiny(target, data, tmp_path / "run", **chosen)
    assert outcome.before is None
    stated = json.loads((outcome.head / "config.json").read_text())["quantization_config"]
    assert stated["config_groups"]["group_0"]["weights"]["group_size"] == 32
    masters = load_file(tmp_path / "run" / "checkpoint-6" / "model.safetensors")
    config = read_head(outcome.head, shape_of(target), torch.float32, "cpu", pack=False).module.config
    whole = head_kind(config).empty(config, torch.float32)
    whole.load_state_dict({name.removeprefix("head."): value for name, value in masters.items()})
    round_linears(whole, StoredFormat("int4", 32).rounding)
    found = plain(outcome.head, target)
    for name, linear in linears(whole).items():
        assert linear.coded is not None
        assert torch.equal(linear.coded.dequantize(), found[f"{name}.weight"]), name


def test_resumed_equals_uninterrupted(target: str, data: Path, tmp_path: Path) -> None:
    chosen = {"quantize_aware": "nvfp4"}
    whole = train_tiny(target, data, tmp_path / "whole", **chosen)
    train_tiny(target, data, tmp_path / "parts", max_steps=6, save_steps=3, **chosen)
    shutil.rmtree(tmp_path / "parts" / "checkpoint-6")
    parts = train_tiny(target, data, tmp_path / "parts", evaluator=None, **chosen)
    one, other = ((each.head / "model.safetensors").read_bytes() for each in (whole, parts))
    assert one == other
    with pytest.raises(SametokenError, match="quantize_aware"):
        train_tiny(target, data, tmp_path / "parts", quantize_aware="fp8")


def test_the_start_is_judged_as_it_is_and_rounded(target: str, data: Path, tmp_path: Path) -> None:
    """Plain and rounded without training; the rounded start is kept until a better head is there."""
    first = train_tiny(target, data, tmp_path / "plain")
    judged: list[bool] = []

    def evaluator(head: Path) -> float:
        rounded = "quantization_config" in json.loads((head / "config.json").read_text())
        judged.append(rounded)
        return 1.5 + 0.1 * len(judged) if rounded else 3.0

    lines: list[str] = []
    outcome = train_tiny(
        target, data, tmp_path / "aware", tell=lines.append, evaluator=evaluator, init_from=str(first.head),
        quantize_aware="fp8", eval_data=str(data), eval_steps=3,
    )  # fmt: skip
    assert judged == [False, True, True, True]
    assert outcome.before == (3.0, pytest.approx(1.7))
    assert outcome.best == pytest.approx(1.9)
    assert any("3.000, rounded to fp8 1.700" in line for line in lines)
    start = [entry for entry in log_of(tmp_path / "aware") if entry["step"] == 0]
    assert start == [{"step": 0, "eval_acceptance_length": pytest.approx(1.7), "plain_acceptance_length": 3.0}]

    def worse(head: Path) -> float:
        judged.append(True)
        return 5.0 - 0.1 * len(judged)

    kept = train_tiny(
        target, data, tmp_path / "worse", evaluator=worse, init_from=str(first.head), quantize_aware="fp8",
        eval_data=str(data), eval_steps=3,
    )  # fmt: skip
    objective = objective_of(target, "eagle3", "fp8", first.head)
    objective.write(tmp_path / "start", objective.state_dict(), torch.float32)
    for name, value in plain(kept.head, target).items():
        assert torch.equal(value, plain(tmp_path / "start", target)[name]), name


def test_training_in_few_bits_is_better_than_rounding_afterwards(target: str, data: Path, tmp_path: Path) -> None:
    """By the loss of the rounded head on what it was trained on, from the same start with the same steps."""
    first = train_tiny(target, data, tmp_path / "first", max_steps=10)
    more = {"init_from": str(first.head), "max_steps": 20, "lr": 1e-3, "logging_steps": 20}
    losses = {}
    for name, chosen in (("aware", {"quantize_aware": "int4"}), ("plain", {})):
        train_tiny(target, data, tmp_path / name, **more, **chosen)
        judged = {**more, "init_from": str(tmp_path / name / "head"), "max_steps": 1, "lr": 1e-9, "num_epochs": 1}
        train_tiny(
            target, data, tmp_path / f"{name}-judged", **{**judged, "train_bs": 64, "logging_steps": 1},
            quantize_aware="int4",
        )  # fmt: skip
        losses[name] = log_of(tmp_path / f"{name}-judged")[0]["loss"]
    assert losses["aware"] < losses["plain"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--quantize-aware", "int5"), "fp8"),
        (("--quantize-aware", "gguf-q8_0"), "fp8"),
        (("--quantize-aware", "int8", "--quantize-group-size", "32"), "quantize_group_size is for quantize_aware int4"),
        (("--quantize-aware", "int8", "--mode", "draft"), "--quantize-aware is for --mode"),
        (("--quantize-aware", "int8", "--mode", "ngram"), "ngram"),
    ],
)
def test_what_is_refused(
    capfd: pytest.CaptureFixture[str], target: str, data: Path, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    answer = call(capfd, "train", target, "--data", str(data), "--output-dir", str(tmp_path / "run"), *arguments)
    assert answer.code == 2
    assert words in answer.err
    assert len(answer.err.strip().splitlines()) == 1


def test_groups_that_do_not_divide_are_named(pair: Any, data: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"of the head has \d+ inputs, expected a multiple of 128"):
        train_tiny(pair.target, data, tmp_path / "run", quantize_aware="int4")
