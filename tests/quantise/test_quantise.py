"""Written checkpoints are read alike by us, compressed-tensors and transformers, and the report's losses are theirs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3MoeConfig

from cli_checks import call, speak
from quantised_readers import read_elsewhere
from sametoken import LLM, SamplingParams
from sametoken.checkpoint.load import read_weights
from sametoken.checkpoint.quantised.layouts import coded
from sametoken.checkpoint.tokenizer_files import load_tokenizer
from sametoken.checkpoint.write import Shards
from sametoken.errors import DataError
from sametoken.files import new_directory
from sametoken.model.formats.coded import Coded
from sametoken.model.formats.rounding import ROUNDINGS
from sametoken.quantise.documents import Documents, read_documents
from sametoken.quantise.report import REPORT

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128, "initializer_range": 0.2,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
MODELS = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True, use_sliding_window=True, sliding_window=9),
    "moe": Qwen3MoeConfig(**SIZES, **MOE),
}
FORMATS = ("fp8", "int8", "int4", "nvfp4", "mxfp4")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models in float32, and one in bfloat16, that have a tokenizer."""
    root = tmp_path_factory.mktemp("plain")
    for name, config in {**MODELS, "bfloat16": MODELS["llama"]}.items():
        torch.manual_seed(0)
        dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype)
        model.save_pretrained(root / name)
        speak(root / name)
    return {name: root / name for name in (*MODELS, "bfloat16")}


def quantised(
    capfd: pytest.CaptureFixture[str], model: Path, place: Path, format: str, *more: str
) -> tuple[Path, dict[str, object]]:
    answer = call(capfd, "quantize", str(model), "--format", format, "--output", str(place), *more)
    assert answer.code == 0, answer.err
    return place, json.loads((place / REPORT).read_text())


def meant(directory: Path) -> dict[str, Tensor]:
    """What our own loader reads, as plain numbers."""
    return {
        item.name: item.tensor.dequantize() if isinstance(item.tensor, Coded) else item.tensor
        for item in read_weights(directory)
    }


@pytest.mark.cover
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", ["llama", "moe", "bfloat16"])
def test_others_read_the_same(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, plain: dict[str, Path], name: str, format: str
) -> None:
    place, _ = quantised(capfd, plain[name], tmp_path / "q", format)
    ours, theirs = meant(place), read_elsewhere(place, format)
    linears = {module for module in ours if "_proj" in module or "experts" in module}
    assert {f"{module}.weight" for module in theirs} == linears
    for module, tensor in theirs.items():
        assert torch.equal(ours[f"{module}.weight"].to(tensor.dtype), tensor), module
    for key, tensor in load_file(plain[name] / "model.safetensors").items():
        if key not in linears:
            assert torch.equal(ours[key], tensor), key
            continue
        error = (ours[key] - tensor.float()).norm() / tensor.float().norm()
        assert error < {"fp8": 0.04, "int8": 0.02}.get(format, 0.2), key


def loss_of(model: PreTrainedModel, documents: list[Tensor]) -> float:
    """Mean over the tokens after the first of each document, by transformers."""
    with torch.no_grad():
        losses = [F.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="none") for ids in documents]
    return float(torch.cat(losses).mean())


def held_out(model: Path) -> Documents:
    return read_documents(None, load_tokenizer(model), SIZES["max_position_embeddings"], (8192, 4096))


@pytest.mark.cover
@pytest.mark.parametrize("format", ["fp8", "int4", "mxfp4"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "moe"])
def test_the_losses_are_those_of_transformers(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, plain: dict[str, Path], name: str, format: str
) -> None:
    """The quantised model as transformers computes it from the numbers that our loader reads."""
    place, report = quantised(capfd, plain[name], tmp_path / "q", format)
    documents = held_out(plain[name]).held_out
    model = AutoModelForCausalLM.from_pretrained(plain[name], attn_implementation="eager")
    assert report["loss_before"] == pytest.approx(loss_of(model, documents), abs=1e-4)
    again = tmp_path / "meant"
    model.save_pretrained(again)
    save_file({key: value.float().contiguous() for key, value in meant(place).items()}, again / "model.safetensors")
    changed = AutoModelForCausalLM.from_pretrained(again, attn_implementation="eager")
    assert report["loss_after"] == pytest.approx(loss_of(changed, documents), abs=1e-4)
    assert report["loss_after"] != report["loss_before"]


@pytest.mark.parametrize("format", ["fp8", "int8", "int4", "mxfp4"])
def test_transformers_loads_it(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, plain: dict[str, Path], format: str
) -> None:
    pytest.importorskip("compressed_tensors")
    place, _ = quantised(capfd, plain["bfloat16"], tmp_path / "q", format)
    model = AutoModelForCausalLM.from_pretrained(place)
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        model(ids)  # decompresses
    ours = meant(place)
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            assert torch.equal(module.weight, ours[f"{name}.weight"].to(torch.bfloat16)), name


@pytest.mark.parametrize("format", FORMATS)
def test_drafts_change_no_token(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, plain: dict[str, Path], format: str
) -> None:
    place, report = quantised(
        capfd, plain["bfloat16"], tmp_path / "q", format, "--draft", str(plain["bfloat16"]), "--osl", "12"
    )
    accepted = report["acceptance"]
    assert isinstance(accepted, dict)
    assert accepted["before"] > 3  # a model is its own best draft
    assert 1 <= accepted["after"] <= accepted["before"]
    setting = SamplingParams(max_tokens=16, temperature=0.8, seed=7)

    def written(draft: str | None) -> list[list[int]]:
        return [list(reply.token_ids) for reply in LLM(str(place), draft).generate(["abcabc", "the cat"], setting)]

    assert written(str(plain["bfloat16"])) == written(None)


def test_layers_are_reported(capfd: pytest.CaptureFixture[str], tmp_path: Path, plain: dict[str, Path]) -> None:
    """Errors are those of the layer's product on inputs that a hook in transformers saw."""
    place, report = quantised(capfd, plain["llama"], tmp_path / "q", "int4")
    model = AutoModelForCausalLM.from_pretrained(plain["llama"], attn_implementation="eager")
    seen: list[Tensor] = []
    layer = model.model.layers[1].mlp.down_proj
    layer.register_forward_pre_hook(lambda module, given: seen.append(given[0][0]))
    loss_of(model, held_out(plain["llama"]).calibration)
    rows, weight = torch.cat(seen), meant(place)["model.layers.1.mlp.down_proj.weight"]
    expected = ((rows @ (weight - layer.weight).T).norm() / (rows @ layer.weight.T).norm()).item()
    found = {each["module"]: each["error"] for each in report["layers"]}  # type: ignore[attr-defined]
    assert len(found) == 14
    assert found["model.layers.1.mlp.down_proj"] == pytest.approx(expected, rel=0.1)  # of some of the rows


@pytest.mark.parametrize("format", ["int4", "nvfp4", "mxfp4", "gguf-q4_0"])
def test_what_inputs_weigh_lowers_the_error_that_counts(format: str) -> None:
    random = torch.Generator().manual_seed(1)
    weight = torch.randn(64, 256, generator=random) * 0.1
    importance = torch.rand(256, generator=random) ** 4 + 1e-3

    def cost(code: Coded) -> float:
        return float(((code.dequantize() - weight).square() * importance).sum())

    assert cost(ROUNDINGS[format](weight, importance)) < cost(ROUNDINGS[format](weight))


@pytest.mark.parametrize("format", list(ROUNDINGS))
def test_weights_of_zero_and_large_ones(format: str) -> None:
    """Zeros stay zeros, and nothing becomes infinite."""
    weight = torch.zeros(4, 128)
    weight[1, 5], weight[2, :], weight[3, ::7] = 3e4, -1e-6, 1e-30
    found = ROUNDINGS[format](weight).dequantize()
    assert found.isfinite().all()
    assert not found[0].any()
    assert found[1, 5] == pytest.approx(3e4, rel=0.15)


def test_shards_have_an_index(tmp_path: Path) -> None:
    shards = Shards(tmp_path, most=100)
    tensors = {f"t{i}": torch.full((10,), float(i)) for i in range(5)}
    for name, tensor in tensors.items():
        shards.add(name, tensor)
    shards.finish()
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [file.name for file in files] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    read = {item.name: item.tensor for item in read_weights(tmp_path)}
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


def test_nothing_is_left_of_a_run_that_was_stopped(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, plain: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    place, _ = quantised(capfd, plain["llama"], tmp_path / "q", "fp8")
    before = {file.name: file.read_bytes() for file in place.iterdir()}

    def stop(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sametoken.quantise.sinks.copy_small_files", stop)
    for target in (place, tmp_path / "new"):
        answer = call(
            capfd, "quantize", str(plain["llama"]), "--format", "int8", "--output", str(target), "--overwrite"
        )
        assert answer.code == 130
    assert {file.name: file.read_bytes() for file in place.iterdir()} == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["q"]


def test_a_full_disk_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No space left"), new_directory(tmp_path / "out"):
        raise OSError(28, "No space left on device")
    assert not any(tmp_path.iterdir())


def test_documents_of_a_file(capfd: pytest.CaptureFixture[str], tmp_path: Path, plain: dict[str, Path]) -> None:
    turns = [{"role": "user", "content": "hello there"}, {"role": "assistant", "content": "good day"}]
    rows = [{"messages": turns}, {"text": "a text alone"}, {"conversations": turns}, {"prompt": "once upon"}]
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    tokenizer = load_tokenizer(plain["llama"])
    found = read_documents(str(file), tokenizer, 128, (100, 100))
    assert [tokenizer.decode(ids.tolist()) for ids in found.held_out] == [
        "user: hello thereassistant: good dayassistant:"
    ]
    assert [tokenizer.decode(ids) for ids in found.prompts] == ["user: hello thereassistant:"]
    assert [len(ids) for ids in found.calibration] == [48, 12, 9]
    _, report = quantised(capfd, plain["llama"], tmp_path / "q", "fp8", "--data", str(file), "--held-out-tokens", "9")
    assert (report["held_out_tokens"], report["calibration_documents"], report["data"]) == (9, 3, str(file))


def test_what_is_refused(capfd: pytest.CaptureFixture[str], tmp_path: Path, plain: dict[str, Path]) -> None:
    source = str(plain["llama"])
    place, _ = quantised(capfd, plain["llama"], tmp_path / "q", "fp8")
    (tmp_path / "two.jsonl").write_text('{"prompt": "ab"}\n{"prompt": "cd"}\n')
    new = str(tmp_path / "new")
    cases = {
        ("--output", str(place)): "is there already; choose another place, or give --overwrite",
        ("--output", str(tmp_path), "--overwrite"): "is not a directory that contains only files",
        ("--output", source, "--overwrite"): "is the model itself",
        ("--output", str(place), "--overwrite", "--draft", str(place)): "is --draft",
        (): "got no --output; expected --output DIR",
        ("--output", new, "--format", "int5"): "did you mean 'int8'?",
        ("--output", new, "--group-size", "32"): "--group-size is for --format int4",
        ("--output", new, "--format", "int4", "--group-size", "48"): "expected one of 32, 64, 128",
        ("--output", new, "--data", str(tmp_path / "two.jsonl")): "fewer than 3 documents",
        ("--output", new, "--draft", str(tmp_path / "nowhere")): "there is no directory",
    }
    for more, words in cases.items():
        answer = call(capfd, "quantize", source, *(() if "--format" in more else ("--format", "fp8")), *more)
        assert answer.code == 2
        assert words in answer.err, more
    answer = call(capfd, "quantize", str(place), "--format", "fp8", "--output", new)
    assert answer.code == 2
    assert "is quantised already (compressed-tensors, float8); expected plain weights" in answer.err
    assert not Path(new).exists()


def test_groups_that_do_not_divide_are_named(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**{**SIZES, "intermediate_size": 96}))
    model.save_pretrained(tmp_path / "odd")
    speak(tmp_path / "odd")
    answer = call(capfd, "quantize", str(tmp_path / "odd"), "--format", "int4", "--output", str(tmp_path / "q"))
    assert answer.code == 2
    assert "block 0 down has 96 inputs, expected a multiple of 128; choose another format or --group-size" in answer.err
    assert quantised(capfd, tmp_path / "odd", tmp_path / "q", "int4", "--group-size", "32")[1]["group"] == 32


def test_layouts_are_the_reverse_of_the_readers() -> None:
    """Every number and scale, not only their product."""
    from sametoken.checkpoint.quantised.scheme import read_scheme
    from sametoken.checkpoint.quantised.write import LAYOUTS, stated

    weight = torch.randn(48, 128, generator=torch.Generator().manual_seed(2))
    for format, layout in LAYOUTS.items():
        code = ROUNDINGS[format](weight)
        files = stated(format, ROUNDINGS[format].group, ["lm_head"], "0")
        schemes = [read_scheme(files["config.json"], None)]
        if "hf_quant_config.json" in files:
            schemes.append(read_scheme({}, files["hf_quant_config.json"]))
        for scheme in schemes:
            assert scheme is not None
            assert scheme.layer("lm_head") is None
            layer = scheme.layer("model.layers.0.mlp.up_proj")
            assert layer is not None
            again = coded({k: v for k, v in layout.parts(code, 1.0).items() if k != "input_scale"}, layer, scheme.tool)
            assert torch.equal(again.codes.view(torch.uint8), code.codes.view(torch.uint8)), format
            assert torch.equal(again.scales(), code.scales()), format
            assert (again.group, again.dynamic) == (code.group, code.dynamic), format
