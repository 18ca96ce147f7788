"""The arithmetic of training's memory: exact for what a process holds, and the table of the documentation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import tiny_models
from sametoken.check.memory import in_words
from sametoken.checkpoint.hub import read_config
from sametoken.learning.target import OuterLayers
from sametoken.model.config import ModelConfig
from sametoken.train.memory import Mode, eagle3_weights, forecast, training_memory
from sametoken.train.sharded_target import load_sharded
from sametoken.train.targets import read_outer

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "max_position_embeddings": 8192, "torch_dtype": "bfloat16", "vocab_size": 128256,
    "num_key_value_heads": 8, "tie_word_embeddings": False,
}  # fmt: skip
TARGETS: dict[str, dict[str, Any]] = {
    "8B": {**LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
           "num_attention_heads": 32},
    "70B": {**LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
            "num_attention_heads": 64},
    "235B": {**LLAMA, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 151936,
             "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 94,
             "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
             "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
}  # fmt: skip


COLUMNS: tuple[tuple[Mode, int, bool], ...] = (
    ("offline", 8, False), ("online", 8, False), ("sharded", 2, False), ("sharded", 8, False), ("sharded", 8, True),
    ("sharded", 16, True),
)  # fmt: skip


@pytest.mark.parametrize("name", TARGETS)
def test_the_documents_table_is_the_arithmetic(name: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    config = ModelConfig.from_hf(TARGETS[name])
    draft = eagle3_weights(config)
    cells = [training_memory(config, draft, mode, count, fsdp=fsdp).total for mode, count, fsdp in COLUMNS]
    assert f"| {name} | {draft / 1e9:.2f} | {' | '.join(f'{cell / 1e9:.0f}' for cell in cells)} |" in page


def test_doctor_says_what_training_takes(run: Any, tmp_path: Path) -> None:
    tiny_models.save("llama-3", tmp_path)
    answer = run("doctor", str(tmp_path), "--training", "--device", "cpu")
    assert answer.code == 0, answer.err
    line = answer.out.splitlines()[-1]
    assert line.startswith("training         an EAGLE-3 head takes in each process: ")
    found = json.loads(run("doctor", str(tmp_path), "--training", "--json", "--device", "cpu").out)["training"]
    assert found == forecast(ModelConfig.from_hf(read_config(tmp_path)))
    assert 0 < found["offline"] < found["online"]
    assert all(f" {in_words(size)} {way}" in line for way, size in found.items())
    assert "training" not in json.loads(run("doctor", str(tmp_path), "--json", "--device", "cpu").out)


@pytest.fixture
def four_processes() -> Iterator[DeviceMesh]:
    """The first of four processes, as far as it can tell: what the others would send is not there."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (4,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("family", ["llama-3", "qwen-3-moe", "gpt-oss"])
def test_a_process_holds_what_the_arithmetic_says(tmp_path: Path, four_processes: DeviceMesh, family: str) -> None:
    tiny_models.save(family, tmp_path)
    config = ModelConfig.from_hf(read_config(tmp_path))
    outer: OuterLayers = read_outer(tmp_path, torch.bfloat16, torch.device("cpu"))
    decoder = load_sharded(tmp_path, outer, torch.bfloat16, four_processes)
    held = 0
    for parameter in decoder.blocks.parameters():
        assert isinstance(parameter, DTensor)
        local = parameter.to_local()
        held += -(-parameter.shape[0] // 4) * local[:1].nbytes if len(local) else 0
        assert local.untyped_storage().nbytes() <= -(-parameter.shape[0] // 4) * parameter[:1].nbytes
    found = training_memory(config, 0, "sharded", 4)
    assert held == found.blocks
    assert outer.vectors.nbytes + (0 if outer.head is outer.vectors else outer.head.nbytes) == found.outer
