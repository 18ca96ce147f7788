"""Experts in files: read from one tensor for each expert or from one for all, and written back as they were."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny_models
from sametoken.checkpoint.experts import single_experts
from sametoken.checkpoint.fill import load_parameters
from sametoken.checkpoint.load import load_decoder
from sametoken.checkpoint.mapping import rules_for
from sametoken.checkpoint.quantised.collect import Item
from sametoken.checkpoint.tensors import read_tensors
from sametoken.checkpoint.write import tensors
from sametoken.errors import CheckpointError, UnsupportedModelError
from sametoken.model.config import ModelConfig
from sametoken.model.decoder import Decoder


@pytest.mark.parametrize(
    "family",
    [
        "mixtral",
        "gpt-oss",
        "qwen-2-moe",
        "qwen-3-moe",
        "glm-4.5-moe",
        "deepseek-v2",
        "deepseek-v3-plain",
        "llama-4",
        "llama-4-images",
    ],
)
def test_what_is_written_is_what_transformers_writes(family: str, tmp_path: Path) -> None:
    model = tiny_models.save(family, tmp_path)
    config = ModelConfig.from_hf({**model.config.to_dict(), "architectures": [type(model).__name__]})
    with torch.device("meta"):
        decoder = Decoder(config, torch.float32)
    own = [Item(name, tensor, tmp_path) for name, tensor in model.state_dict().items()]  # experts in one tensor
    rules = rules_for(config)
    load_parameters(decoder, single_experts(own, config), rules, torch.float32, "cpu", pack=False)
    # Experts one by one, but for gpt-oss and Llama 4, and without the part that reads images.
    stored = {item.name: item.tensor for item in read_tensors(tmp_path) if not rules.ignores(item.name)}
    written = dict(tensors(decoder))
    assert written.keys() == stored.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in stored.items())


def test_blocks_that_guess_further_tokens_are_left_out(tmp_path: Path) -> None:
    """Those that config.json names; others are no weights of the model."""
    tiny_models.save("glm-4.5-moe", tmp_path)
    last, stored = tiny_models.COMMON["num_hidden_layers"], load_file(tmp_path / "model.safetensors")
    for layer, fits in ((last, True), (last + 1, False)):
        further = {f"model.layers.{layer}.eh_proj.weight": torch.ones(2, 2)}
        save_file({**stored, **further}, tmp_path / "model.safetensors", {"format": "pt"})
        if fits:
            load_decoder(tmp_path, torch.float32, "cpu")
            continue
        with pytest.raises(CheckpointError, match=f"model.layers.{layer}.eh_proj.weight"):
            load_decoder(tmp_path, torch.float32, "cpu")


def test_the_bias_of_the_choice_keeps_its_digits(tmp_path: Path) -> None:
    model = tiny_models.save("glm-4.5-moe", tmp_path)
    decoder = load_decoder(tmp_path, torch.bfloat16, "cpu")
    stored = model.model.layers[1].mlp.gate.e_score_correction_bias
    assert torch.equal(dict(decoder.named_parameters())["blocks.1.experts.choice_bias"], stored)


def test_another_number_of_experts_is_refused(tmp_path: Path) -> None:
    tiny_models.save("mixtral", tmp_path)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace('"num_local_experts": 5', '"num_local_experts": 6'))
    with pytest.raises(CheckpointError, match=r"has shape \[5, 64\], expected \[6, 64\]"):
        load_decoder(tmp_path, torch.float32, "cpu")
    file.write_text(file.read_text().replace('"num_experts_per_tok": 2', '"num_experts_per_tok": 7'))
    with pytest.raises(CheckpointError, match="7 'num_experts_per_tok' and 6 'num_local_experts'"):
        load_decoder(tmp_path, torch.float32, "cpu")


def test_experts_of_llama_4_may_stand_alone_in_files(tmp_path: Path) -> None:
    """As tools write them that quantise each expert's layers."""
    tiny_models.save("llama-4", tmp_path)
    read = torch.randn(7, tiny_models.COMMON["hidden_size"])
    expected = load_decoder(tmp_path, torch.float32, "cpu").blocks[1].get_submodule("experts")(read)
    found = load_file(tmp_path / "model.safetensors")
    for name in [name for name in found if ".experts." in name]:
        prefix, _, part = name.rpartition(".")
        for expert, weight in enumerate(found.pop(name).mT):
            parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
            pieces = zip(parts, weight.chunk(len(parts)), strict=True)
            found |= {f"{prefix}.{expert}.{own}.weight": piece.contiguous() for own, piece in pieces}
    save_file(found, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = load_decoder(tmp_path, torch.float32, "cpu").blocks[1].get_submodule("experts")
    assert torch.equal(loaded(read), expected)


@pytest.mark.parametrize("family", ["gpt-oss", "deepseek-v2", "llama-4"])
def test_what_cuda_lacks_is_refused_by_name(family: str, tmp_path: Path) -> None:
    tiny_models.save(family, tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"\(.*\) is not supported on CUDA; use --device cpu"):
        load_decoder(tmp_path, torch.bfloat16, "cuda")
