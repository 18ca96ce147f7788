"""`sametoken quantize HEAD` writes what the formats say, others read the same, and drafts change no token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cli_checks import call
from engine_checks import alone, llama, make_llm, prompts, said
from head_checks import WIDE, WIDE_HEADS, shape_of, write_wide_heads
from matrix import crossed
from quantised_readers import read_elsewhere
from sametoken import SamplingParams
from sametoken.heads.kind import Head
from sametoken.heads.modules import linears
from sametoken.heads.read import read_head
from sametoken.model.formats.rounding import ROUNDINGS
from sametoken.quantise.report import REPORT

pytestmark = pytest.mark.usefixtures("one_thread")

FORMATS = ("fp8", "int8", "int4", "nvfp4", "mxfp4")
REQUESTS = [
    (prompt, SamplingParams(temperature=(0.0, 0.8)[i % 2], seed=i, max_tokens=10, ignore_eos=True, logprobs=2))
    for i, prompt in enumerate(prompts(4, 120))
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return llama(tmp_path_factory.mktemp("target"), **WIDE)


@pytest.fixture(scope="module")
def heads(target: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_wide_heads(target, tmp_path_factory.mktemp("heads"))


def quantised(
    capfd: pytest.CaptureFixture[str], head: Path, target: str, place: Path, format: str, *more: str
) -> dict[str, Any]:
    """The report of a head that is written to a place."""
    options = ("--target", target, "--format", format, "--output", str(place), "--osl", "8", *more)
    answer = call(capfd, "quantize", str(head), *options)
    assert answer.code == 0, answer.err
    found: dict[str, Any] = json.loads((place / REPORT).read_text())
    return found


def read(head: Path, target: str) -> Head:
    return read_head(head, shape_of(target), torch.float32, "cpu", pack=False).module


@pytest.mark.parametrize(("name", "format"), crossed(WIDE_HEADS, FORMATS))
def test_what_is_written_is_read_alike_everywhere(
    capfd: pytest.CaptureFixture[str], heads: dict[str, Path], target: str, tmp_path: Path, name: str, format: str
) -> None:
    place = tmp_path / "q"
    report = quantised(capfd, heads[name], target, place, format)
    plain, found = read(heads[name], target), read(place, target)
    for key, linear in linears(plain).items():
        expected = ROUNDINGS[format](linear.weight.detach()).dequantize()
        assert torch.equal(linears(found)[key].weight, expected), key
    rest = dict(found.named_parameters())
    for key, value in plain.named_parameters():
        if key.removesuffix(".weight") not in linears(plain):
            assert torch.equal(rest[key], value), key
    assert [each["module"] for each in report["layers"]] == list(linears(plain))
    assert all(0 < each["error"] < 0.3 for each in report["layers"])
    assert report["bytes_after"] < report["bytes_before"]
    assert report["acceptance"]["prompts"] > 0
    elsewhere = read_elsewhere(place, format)
    (file,) = place.glob("*.safetensors")
    (own,) = heads[name].glob("*.safetensors")
    original = load_file(own)
    assert len(elsewhere) == sum("weight" in key and value.dim() == 2 for key, value in original.items())
    for module, tensor in elsewhere.items():
        error = (tensor.float() - original[f"{module}.weight"]).norm() / original[f"{module}.weight"].norm()
        assert error < {"fp8": 0.04, "int8": 0.02}.get(format, 0.2), (file, module)
    everything = torch.cat([value.flatten().sort().values for value in elsewhere.values()]).float().sort().values
    ours = torch.cat([linear.weight.flatten() for linear in linears(found).values()]).sort().values
    assert torch.equal(ours.to(next(iter(elsewhere.values())).dtype).float(), everything)


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "format"), crossed(["eagle1", "eagle3", "medusa"], FORMATS))
def test_drafts_change_no_token(
    capfd: pytest.CaptureFixture[str], heads: dict[str, Path], target: str, tmp_path: Path, name: str, format: str
) -> None:
    quantised(capfd, heads[name], target, tmp_path / "q", format)
    plainly, llm = make_llm(target, cache={"enable_block_reuse": False}), make_llm(target, str(tmp_path / "q"))
    expected = [alone(plainly, *request) for request in REQUESTS]
    got = llm.generate([prompt for prompt, _ in REQUESTS], [params for _, params in REQUESTS])
    assert [said(each) for each in got] == [said(each) for each in expected]
    assert all(each.speculation.drafted_by.get(llm.method, 0) > 0 for each in got)


def test_groups_and_what_stands_beside(
    capfd: pytest.CaptureFixture[str], heads: dict[str, Path], target: str, tmp_path: Path
) -> None:
    report = quantised(capfd, heads["eagle3"], target, tmp_path / "q", "int4", "--group-size", "32")
    assert report["group"] == 32
    assert report["target"] == target
    again = call(capfd, "quantize", str(heads["eagle3"]), "--target", target, "--format", "fp8", "--output",
                 str(tmp_path / "q"))  # fmt: skip
    assert again.code == 2
    assert "--overwrite" in again.err


def test_what_is_refused(
    capfd: pytest.CaptureFixture[str], heads: dict[str, Path], target: str, tmp_path: Path
) -> None:
    head, place = str(heads["eagle3"]), str(tmp_path / "out")

    def refused(name: str, *more: str) -> str:
        answer = call(capfd, "quantize", name, "--output", place, *more)
        assert answer.code == 2, answer.out
        assert len(answer.err.strip().splitlines()) == 1
        assert not Path(place).exists()
        return answer.err

    assert "is a head; give --target" in refused(head, "--format", "fp8")
    assert "is for whole models" in refused(head, "--format", "gguf-q8_0", "--target", target)
    assert "leave it out" in refused(head, "--format", "fp8", "--target", target, "--draft", head)
    assert "is no head" in refused(target, "--format", "fp8", "--target", target)
    quantised(capfd, heads["eagle3.1"], target, tmp_path / "once", "fp8")
    assert "is quantised already" in refused(str(tmp_path / "once"), "--format", "fp8", "--target", target)
    small = llama(tmp_path / "small", **{**WIDE, "hidden_size": 64})
    capfd.readouterr()
    assert "another model" in refused(head, "--format", "fp8", "--target", small)
    same = call(capfd, "quantize", head, "--format", "fp8", "--target", small, "--output", small, "--overwrite")
    assert (same.code, "is --target" in same.err) == (2, True)
    assert (Path(small) / "config.json").exists()
