"""Heads whose files are quantised: read as they are meant, served as they are, and without any effect on the text.

Oracles: the numbers that `quantised_makers` had before it packed them, and plain decoding.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cli_checks import call
from engine_checks import alone, check_idle, llama, make_llm, prompts, said
from head_checks import WIDE, WIDE_HEADS, shape_of, write_wide_heads
from quantised_makers import MADE, quantised
from sametoken import SamplingParams
from sametoken.errors import ConfigError, SametokenError, UnsupportedModelError
from sametoken.heads.eagle.drafter import NativeEagle
from sametoken.heads.eagle.module import EagleHead
from sametoken.heads.kind import Head
from sametoken.heads.read import is_head, read_head
from sametoken.heads.serve import load_draft
from sametoken.kernels.cpu.variant import library
from sametoken.model.linear import Linear

pytestmark = pytest.mark.usefixtures("one_thread")

CHOSEN = ("_proj", "fc.weight", ".linear.weight")  # their configurations leave `lm_head` plain
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


def plain(directory: Path, target: str) -> dict[str, torch.Tensor]:
    head = read_head(directory, shape_of(target), torch.float32, "cpu", pack=False).module
    return dict(head.named_parameters())


@pytest.mark.cover
@pytest.mark.parametrize("format", MADE)
@pytest.mark.parametrize("name", WIDE_HEADS)
def test_what_is_read_is_what_was_written(
    heads: dict[str, Path], target: str, tmp_path: Path, name: str, format: str
) -> None:
    place = quantised(heads[name], format, tmp_path / "q", tmp_path / "meant", CHOSEN)
    assert is_head(place)
    ours, meant = plain(place, target), plain(tmp_path / "meant", target)
    assert ours.keys() == meant.keys()
    for key, value in meant.items():
        assert torch.equal(ours[key], value), key


@pytest.mark.cover
@pytest.mark.parametrize("format", ["fp8-blocks", "nvfp4", "w4a16", "w8a8", "awq", "gptq-64-order"])
@pytest.mark.parametrize("name", WIDE_HEADS)
def test_the_text_is_that_of_plain_decoding(
    heads: dict[str, Path], target: str, tmp_path: Path, name: str, format: str
) -> None:
    place = quantised(heads[name], format, tmp_path / "q", None, CHOSEN)
    plainly, llm = make_llm(target, cache={"enable_block_reuse": False}), make_llm(target, str(place))
    expected = [alone(plainly, *request) for request in REQUESTS]
    got = llm.generate([prompt for prompt, _ in REQUESTS], [params for _, params in REQUESTS])
    assert [said(each) for each in got] == [said(each) for each in expected]
    assert all(each.speculation.drafted_by.get(llm.method, 0) > 0 for each in got)
    check_idle(llm.engine)


@pytest.mark.cover
@pytest.mark.parametrize("format", ["fp8", "mxfp4", "nvfp4-compressed", "w4a16-zeros", "w8a8", "gptq-8"])
@pytest.mark.parametrize("name", WIDE_HEADS)
def test_the_compiled_kernels_compute_with_the_codes(
    heads: dict[str, Path], target: str, tmp_path: Path, name: str, format: str
) -> None:
    """Every linear layer holds what is stored, and drafts are those of the same head in torch."""
    if library() is None:
        pytest.skip("no compiled kernels")
    place, shape = quantised(heads[name], format, tmp_path / "q", None, CHOSEN), shape_of(target)
    head = load_draft(place, shape, torch.bfloat16, torch.device("cpu"), "none", True).module
    stored = read_head(place, shape, torch.float32, "cpu", pack=False).module
    for key, linear in linears(head).items():
        assert linear.native is not None
        plain_bytes = 2 * linear.in_features * linear.out_features
        if "head" not in key.split("."):
            assert sum(tensor.nbytes for tensor in linear.native.parts.values()) < 0.72 * plain_bytes, key
    if isinstance(head, EagleHead):
        assert NativeEagle.of(head, make_llm(target, dtype="bfloat16").engine.runner.decoder) is not None
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    for key, linear in linears(head).items():
        whole, wide = linears(stored)[key], x.repeat(1, linear.in_features // 128)
        expected = whole.weight @ wide.float().t()
        got = linear(wide).float().t() - (0 if linear.bias is None else linear.bias.float().unsqueeze(1))
        assert (got - expected).norm() < 0.02 * expected.norm(), key


def linears(head: Head) -> dict[str, Linear]:
    return {name: part for name, part in head.named_modules() if isinstance(part, Linear)}


def edited(source: Path, place: Path, tensors: dict[str, torch.Tensor | None], **stated: Any) -> Path:
    """A copy of a head with other tensors (None leaves one out) and keys of config.json."""
    place.mkdir()
    (file,) = source.glob("*.safetensors")
    kept = {**load_file(file), **tensors}
    save_file({key: value for key, value in kept.items() if value is not None}, place / file.name)
    config = json.loads((source / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, **stated}))
    return place


def refused(place: Path, target: str) -> str:
    with pytest.raises(SametokenError) as caught:
        load_draft(place, shape_of(target), torch.float32, torch.device("cpu"), "none", True)
    return str(caught.value)


def test_what_is_refused(heads: dict[str, Path], target: str, tmp_path: Path) -> None:
    fp8 = quantised(heads["eagle3"], "fp8", tmp_path / "fp8", None, CHOSEN)
    lost = refused(edited(fp8, tmp_path / "lost", {"fc.weight_scale": None}), target)
    assert "fc" in lost
    assert "scale" in lost
    absurd = refused(edited(fp8, tmp_path / "absurd", {"fc.weight_scale": torch.tensor(float("nan"))}), target)
    assert "fc" in absurd
    assert "scale" in absurd
    fused = {f"layers.1.self_attn.{part}": None for part in ("k_proj.weight_scale", "k_proj.weight")}
    mixed = edited(fp8, tmp_path / "mixed", {**fused, "layers.1.self_attn.k_proj.weight": torch.ones(64, 128)})
    assert "expected one format for all of them" in refused(mixed, target)
    packed = quantised(heads["medusa"], "w4a16", tmp_path / "packed", None, CHOSEN)
    lost = refused(edited(packed, tmp_path / "packed-lost", {"0.0.linear.weight_scale": None}), target)
    assert "0.0.linear" in lost
    assert "no weight_scale" in lost
    other = edited(heads["eagle3"], tmp_path / "other", {}, quantization_config={"quant_method": "bitsandbytes"})
    with pytest.raises(UnsupportedModelError, match="bitsandbytes"):
        read_head(other, shape_of(target), torch.float32, "cpu", pack=True)
    with pytest.raises(ConfigError, match=r"draft_quantization 'int8'.*quantised already"):
        load_draft(fp8, shape_of(target), torch.bfloat16, torch.device("cpu"), "int8", True)


def test_other_commands_read_it(
    capfd: pytest.CaptureFixture[str], heads: dict[str, Path], target: str, tmp_path: Path
) -> None:
    place = quantised(heads["eagle3"], "w8a16", tmp_path / "q", tmp_path / "meant", CHOSEN)
    answer = call(capfd, "doctor", str(place), "--target", target)
    assert answer.code == 0, answer.err
    planned = call(capfd, "doctor", target, "--draft", str(place), "--json")
    assert planned.code == 0, planned.err
    answer = call(capfd, "export", str(place), "--target", target, "--output", str(tmp_path / "plain"))
    assert answer.code == 0, answer.err
    exported, meant = plain(tmp_path / "plain", target), plain(tmp_path / "meant", target)
    assert all(torch.equal(exported[key], value) for key, value in meant.items())
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
