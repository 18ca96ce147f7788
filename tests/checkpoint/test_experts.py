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
from sametoken.errors import CheckpointError
from sametoken.model.config import ModelConfig
from sametoken.model.decoder import Decoder


@pytest.mark.parametrize(
    "family", ["mixtral", "gpt-oss", "qwen-2-moe", "qwen-3-moe", "glm-4.5-moe", "deepseek-v2", "deepseek-v3-plain"]
)
def test_what_is_written_is_what_transformers_writes(family: str, tmp_path: Path) -> None:
    model = tiny_models.save(family, tmp_path)
    config = ModelConfig.from_hf({**model.config.to_dict(), "architectures": [type(model).__name__]})
    with torch.device("meta"):
        decoder = Decoder(config, torch.float32)
    own = [Item(name, tensor, tmp_path) for name, tensor in model.state_dict().items()]  # experts in one tensor
    load_parameters(decoder, single_experts(own, config), rules_for(config), torch.float32, "cpu", pack=False)
    stored = {item.name: item.tensor for item in read_tensors(tmp_path)}  # experts one by one
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
