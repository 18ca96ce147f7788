"""Quantised checkpoints in an engine: any draft stays lossless, memory stays small, bad files are refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from cli_checks import speak
from matrix import mark
from quantised_makers import MADE, quantised
from sametoken import LLM, SamplingParams
from sametoken.checkpoint.load import load_decoder
from sametoken.errors import CheckpointError, ConfigError, SametokenError, UnsupportedModelError

SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 256, "initializer_range": 0.2,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
PROMPTS = ["abcabcabc", "the cat and the cat", "zzyyxx"]


DRAFTED, QUICK = ("fp8", "nvfp4", "awq", "gptq-64-order", "mxfp4", "w8a8"), ("fp8", "nvfp4", "gptq-64-order")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama model that has a tokenizer."""
    folder = tmp_path_factory.mktemp("plain") / "model"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).save_pretrained(folder)
    speak(folder)
    return folder


@pytest.fixture
def stored(plain: Path, tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: quantised(plain, name, tmp_path / name)


@pytest.mark.parametrize("name", [pytest.param(name, marks=mark(name in QUICK)) for name in DRAFTED])
def test_drafts_change_no_token(name: str, plain: Path, stored: Callable[[str], Path]) -> None:
    directory = str(stored(name))
    settings = [SamplingParams(max_tokens=24, temperature=t, seed=7) for t in (0.0, 0.8)]

    def written(method: str, draft: str | None) -> list[list[int]]:
        llm = LLM(directory, draft, speculative={"method": method})
        return [list(reply.token_ids) for setting in settings for reply in llm.generate(PROMPTS, setting)]

    expected = written("none", None)
    assert written("ngram", None) == expected
    assert written("draft_target", str(plain)) == expected  # nearly the same model: most of its tokens are accepted
    assert written("draft_target", directory) == expected


def test_quantising_twice_is_refused(stored: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"quantised already \(AWQ, 4-bit integers\); leave it out"):
        load_decoder(stored("awq"), torch.bfloat16, "cpu", quantization="int8")


def changed(directory: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    return directory


def put(name: str, make: Callable[[Tensor], Tensor | None]) -> Callable[[dict[str, Tensor]], None]:
    """A change of one tensor; None takes it away."""

    def change(tensors: dict[str, Tensor]) -> None:
        made = make(tensors.pop(name))
        if made is not None:
            tensors[name] = made

    return change


MLP, ATTENTION = "model.layers.0.mlp.", "model.layers.1.self_attn."
BAD: list[tuple[str, Callable[[dict[str, Tensor]], None], str]] = [
    ("fp8", put(f"{MLP}up_proj.weight_scale", torch.zeros_like), "mlp.up_proj (Model-Optimizer FP8): its scales lie"),
    ("fp8", put(f"{MLP}up_proj.weight_scale", lambda x: x * float("nan")), "expected positive finite numbers"),
    ("fp8", put(f"{MLP}up_proj.weight_scale", lambda x: -x), "expected positive finite numbers"),
    ("fp8", put(f"{MLP}up_proj.weight_scale", lambda x: None), "up_proj.weight holds torch.float8_e4m3fn, expected"),
    ("fp8", put(f"{MLP}up_proj.weight", lambda x: torch.full_like(x.float(), float("nan")).to(x.dtype)), "holds NaN"),
    ("fp8", put(f"{MLP}up_proj.weight_scale", lambda x: torch.ones(3)), "has shape [3, 1], expected [256, 1]"),
    ("fp8-blocks", put(f"{MLP}up_proj.weight_scale_inv", lambda x: x[:1]), "has shape [1, 4], expected [8, 4]"),
    ("nvfp4", put(f"{MLP}up_proj.weight_scale_2", lambda x: None), "but no weight_scale_2"),
    ("nvfp4", put(f"{MLP}up_proj.weight_scale_2", lambda x: x * float("inf")), "its global scales lie between inf"),
    ("nvfp4", put(f"{MLP}up_proj.weight", lambda x: x[:, :-1].clone()), "weight_scale has shape [256, 8], expected"),
    ("nvfp4", put(f"{MLP}up_proj.weight", lambda x: x.to(torch.int16)), "holds torch.int16, expected one of"),
    ("awq", put(f"{MLP}up_proj.qzeros", lambda x: None), "it has qweight, scales but no qzeros"),
    ("awq", put(f"{MLP}up_proj.scales", lambda x: x[:2].clone()), "qzeros has shape [4, 32], expected [2, 32]"),
    ("awq", put(f"{MLP}up_proj.qweight", lambda x: x.to(torch.int64)), "its packed integers are torch.int64, expected"),
    ("gptq", put(f"{MLP}up_proj.g_idx", torch.zeros_like), "its g_idx names groups of other sizes than 32 inputs"),
    ("w8a8", put(f"{MLP}up_proj.weight_scale", lambda x: x.repeat(1, 17)), "of 17 groups, expected 16 groups of 8"),
    ("w4a16", put(f"{MLP}up_proj.weight_shape", lambda x: x * 2), "expected [512, 32]"),
    ("gptq-64-order", put(f"{ATTENTION}k_proj.g_idx", lambda x: x.flip(0).contiguous()), "cannot be joined with the"),
    ("fp8", lambda x: x.update({f"{MLP}up_proj.pre_quant_scale": torch.ones(128)}), "holds scales of the inputs"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "words"), BAD, ids=[words[:40] for _, _, words in BAD])
def test_bad_tensors_are_named(
    name: str, change: Callable[[dict[str, Tensor]], None], words: str, stored: Callable[[str], Path]
) -> None:
    directory = changed(stored(name), change)
    with pytest.raises(CheckpointError) as caught:
        load_decoder(directory, torch.bfloat16, "cpu")
    message = str(caught.value)
    assert words in message
    assert str(directory) in message
    assert "model.layers." in message
    assert len(message.splitlines()) == 1


def test_a_fused_product_of_plain_and_quantised_parts_is_refused(plain: Path, stored: Callable[[str], Path]) -> None:
    name = f"{ATTENTION}k_proj"
    dense = load_file(plain / "model.safetensors")[f"{name}.weight"]

    def change(tensors: dict[str, Tensor]) -> None:
        for key in [key for key in tensors if key.startswith(f"{name}.")]:
            del tensors[key]
        tensors[f"{name}.weight"] = dense

    with pytest.raises(UnsupportedModelError, match="expected one format for all of them"):
        load_decoder(changed(stored("awq"), change), torch.bfloat16, "cpu")


def test_a_layer_that_the_configuration_leaves_out_may_not_be_quantised(stored: Callable[[str], Path]) -> None:
    directory = stored("nvfp4")
    file = directory / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["ignore"] = ["lm_head", "model.layers.0*"]
    file.write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match=r"layers.0.*is stored quantised.*but the configuration states that it is not"
    ):
        load_decoder(directory, torch.bfloat16, "cpu")


def test_files_that_execute_code_and_cut_files_are_refused(stored: Callable[[str], Path]) -> None:
    directory = stored("awq")
    whole = directory / "model.safetensors"
    cut = shutil.copytree(directory, directory.parent / "cut") / "model.safetensors"
    cut.write_bytes(whole.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        load_decoder(cut.parent, torch.bfloat16, "cpu")
    torch.save(load_file(whole), directory / "pytorch_model.bin")
    whole.unlink()
    with pytest.raises(CheckpointError, match="expected them in safetensors; convert the file"):
        load_decoder(directory, torch.bfloat16, "cpu")


def test_stated_tensors_without_a_statement_are_unexpected(stored: Callable[[str], Path]) -> None:
    directory = stored("awq")
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": None}))
    with pytest.raises(SametokenError, match=r"unexpected.*qweight"):
        load_decoder(directory, torch.bfloat16, "cpu")


MEASURE = """
import sys, threading, time, torch
from pathlib import Path
from sametoken.checkpoint.load import load_decoder
def memory(key):
    return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith(key))) * 1024
before, peak, running = memory("RssAnon"), 0, True
def watch():
    global peak
    while running:
        peak = max(peak, memory("RssAnon"))
        time.sleep(0.002)
thread = threading.Thread(target=watch); thread.start()
decoder = load_decoder(Path(sys.argv[1]), torch.bfloat16, "cpu")
running = False
thread.join()
print(max(peak, memory("RssAnon")) - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("name", ["nvfp4", pytest.param("w4a16", marks=pytest.mark.thorough)])
def test_no_format_is_expanded_whole(name: str, tmp_path: Path) -> None:
    """The peak of loading is what the file holds, a few copies of one layer, and what torch takes for itself."""
    sizes = {**SIZES, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 12, "head_dim": 256}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes), dtype=torch.bfloat16)
    make = MADE[name].make
    one: dict[tuple[int, ...], dict[str, Tensor]] = {}
    tensors: dict[str, Tensor] = {}
    for key, tensor in model.state_dict().items():
        if "_proj" not in key:
            tensors[key] = tensor
            continue
        if tuple(tensor.shape) not in one:
            one[tuple(tensor.shape)] = make(tensor.float())[0]
        tensors |= {f"{key.removesuffix('weight')}{kind}": part for kind, part in one[tuple(tensor.shape)].items()}
    save_file({key: value.clone().contiguous() for key, value in tensors.items()}, tmp_path / "model.safetensors")
    config = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"], "quantization_config": MADE[name].config}
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    del model, tensors
    file = (tmp_path / "model.safetensors").stat().st_size
    assert file > 80e6
    ran = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    plain = 2 * 12 * (4 * 1024 * 1024 + 3 * 3072 * 1024)
    assert int(ran.stdout) <= file + 50e6 < plain / 2
