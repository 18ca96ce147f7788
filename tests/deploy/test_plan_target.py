"""`sametoken deploy plan` refuses targets: formats that the engine does not read, and ranks that cannot share it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sametoken.deploy.plan.models import check_target

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 8, "intermediate_size": 192, "vocab_size": 512,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.mark.parametrize("engine", ["sametoken", "vllm", "sglang", "trtllm"])
def test_ranks_that_do_not_divide_the_model_are_refused(run: Any, model: Path, engine: str) -> None:
    assert run("deploy", "plan", str(model), "--engine", engine, "--tp-size", "4").code == 0
    answer = run("deploy", "plan", str(model), "--engine", engine, "--tp-size", "5")
    assert answer.code == 2
    assert "tp-size 5" in answer.err
    shared = "1, 2, 4" if engine == "sametoken" else "1, 2, 4, 12"  # theirs keep keys and values several times
    assert f"use one of {shared}" in answer.err


@pytest.mark.parametrize(
    ("engine", "method", "problem"),
    [
        ("vllm", "gguf", "which vLLM does not read; use --engine sametoken or SGLang, or"),
        ("trtllm", "gguf", "which TensorRT-LLM does not read; use --engine sametoken or SGLang, or"),
        ("trtllm", "bitsandbytes", "which TensorRT-LLM does not read"),
        ("trtllm", "compressed-tensors", None),
        ("sglang", "gguf", ""),
        ("vllm", "awq", ""),
    ],
)
def test_formats(run: Any, model: Path, engine: str, method: str, problem: str | None) -> None:
    (model / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": {"quant_method": method}}))
    answer = run("deploy", "plan", str(model), "--engine", engine)
    assert answer.code == (2 if problem else 0), answer.err
    assert problem is None or problem in answer.err
    assert ("was not checked" in answer.err) == (problem is None)


def test_a_model_of_the_hub_is_not_looked_at() -> None:
    assert check_target("owner/nowhere", "vllm", 7) == ()
