"""What is no checkpoint that can be loaded: the error says what it is, that it is not supported, and what works."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from cli_checks import Pair
from head_checks import eagle_config, random_weights, shape_of
from sametoken import LLM, SametokenError
from sametoken.errors import CheckpointError, MemoryPlanError
from sametoken.heads.eagle.module import EagleHead
from sametoken.heads.write import write_head
from sametoken.model.families import FAMILIES
from sametoken.model.unsupported import ARCHITECTURES, FORMATS


def refusal(model: Path | str, draft: Path | None = None) -> str:
    with pytest.raises(SametokenError) as caught:
        LLM(str(model), None if draft is None else str(draft))
    assert isinstance(caught.value, CheckpointError)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert str(model) in message or str(draft) in message
    return message


@pytest.fixture
def checkpoint(tiny_pair: Pair, tmp_path: Path) -> Path:
    """A copy of the tiny target, to be changed."""
    return Path(shutil.copytree(tiny_pair.target, tmp_path / "model"))


@pytest.fixture
def head(tiny_pair: Pair, tmp_path: Path) -> Path:
    target = shape_of(tiny_pair.target)
    made = EagleHead(eagle_config(target), torch.float32)
    random_weights(made)
    write_head(made, tmp_path / "head", target, target_name=tiny_pair.target)
    return tmp_path / "head"


def change(directory: Path, **keys: Any) -> Path:
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))
    return directory


# What config.json of published models says, without the sizes.
PUBLISHED: list[tuple[dict[str, Any], str, str]] = [
    ({"architectures": ["Gemma3nForConditionalGeneration"], "text_config": {}, "vision_config": {}},
     "is Gemma 3n, a model that reads images and sound", "Gemma 2 or 3"),
    ({"architectures": ["GemmaForCausalLM"], "model_type": "gemma"}, "is a Gemma decoder of the first kind",
     "Gemma 2 or 3"),
    ({"architectures": ["LlamaForCausalLM"], "is_encoder_decoder": True}, "is an encoder-decoder", "ForCausalLM"),
    ({"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": {}},
     "is Mistral Small 3.1 or later", "mistralai/Mistral-Small-24B-Instruct-2501"),
    ({"architectures": ["OlmoeForCausalLM"], "num_experts": 64}, "mixture of experts with other parts", "30B-A3B"),
    ({"architectures": ["PhimoeForCausalLM"], "num_experts": 128}, "mixture of experts", "Qwen/Qwen3-30B-A3B"),
    ({"architectures": ["DeepseekV32ForCausalLM"], "quantization_config": {"quant_method": "fp8"}}, "latent",
     "30B-A3B"),
    ({"architectures": ["NewMoeForCausalLM"]}, "mixture of experts", "30B-A3B"),
    ({"architectures": ["NewForCausalLM"], "n_routed_experts": 4}, "mixture of experts", "30B-A3B"),
    ({"architectures": ["Qwen2_5_VLForConditionalGeneration"], "vision_config": {}}, "reads images", "text-only Qwen"),
    ({"architectures": ["LlavaForConditionalGeneration"], "text_config": {}}, "reads images", "text-only"),
    ({"architectures": ["BertForMaskedLM"]}, "is an encoder, which writes no text", "ForCausalLM"),
    ({"architectures": ["XLMRobertaModel"]}, "is an encoder, which writes no text", "ForCausalLM"),
    ({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, "encoder-decoder", "ForCausalLM"),
    ({"architectures": ["FalconForCausalLM"]}, "a decoder of another family", "LlamaForCausalLM"),
    ({"architectures": ["MambaForCausalLM"]}, "recurrent", "Qwen/Qwen3-8B"),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "what", "instead"), PUBLISHED, ids=lambda value: str(value)[:40])
def test_architectures_say_what_they_are(keys: dict[str, Any], what: str, instead: str, checkpoint: Path) -> None:
    message = refusal(change(checkpoint, **keys))
    assert what in message
    assert "support" in message
    assert instead in message
    assert keys["architectures"][0] in message


def test_the_table_names_no_architecture_that_can_be_loaded() -> None:
    assert not FAMILIES.keys() & ARCHITECTURES.keys()
    assert all("support" in kind.what for kind in ARCHITECTURES.values())


@pytest.mark.parametrize(
    ("stated", "name"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "torchao"}, "torchao"),
        ({"quant_method": "mxfp4"}, "MXFP4"),
        ({"quant_method": "later-than-this"}, "'later-than-this'"),
        ({}, "a format that it does not name"),
        ("int4", "a format that it does not name"),
    ],
)
def test_quantised_weights_say_in_which_format(stated: Any, name: str, checkpoint: Path) -> None:
    message = refusal(change(checkpoint, quantization_config=stated))
    assert f"'quantization_config': the weights are quantised ({name}" in message
    assert "not supported yet; use the unquantised checkpoint, and --quantization int8 or int4" in message


GROUP = {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}, "targets": ["Linear"]}


@pytest.mark.parametrize(
    ("stated", "what"),
    [
        ({"quant_method": "awq", "version": "gemv"}, "has 'gemv' for 'version'; supported: gemm"),
        ({"quant_method": "awq", "bits": 3}, "AWQ with 3 bits is not supported, expected 4"),
        ({"quant_method": "awq", "bits": "four"}, "'four' for 'bits', expected a positive integer"),
        ({"quant_method": "gptq", "bits": 3}, "GPTQ with 3 bits is not supported, expected 4 or 8"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin' for 'checkpoint_format'"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*": {"bits": 8}}}, "other settings for some modules"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size is 0, expected -1 or a positive integer"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "'e5m2' for 'fmt'; supported: e4m3"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size is [128], expected two positive"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "'W4A8_AWQ' for 'quant_algo'; supported: FP8"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "without quantized_layers"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": 3}, "ignore is 3, expected a list of names"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "'marlin-24' for 'format'"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "config_groups has no weights"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": GROUP}, "sparsity_config": {"format": "24"}},
            "sparse weights",
        ),
        (
            {
                "quant_method": "compressed-tensors", "config_groups": {"a": GROUP},
                "transform_config": {"config_groups": {"u": {}}},
            },
            "transform_config",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {**GROUP, "weights": {**GROUP["weights"], "num_bits": 6}}},
            },
            "compressed-tensors with 6 bits is not supported",
        ),
    ],
)  # fmt: skip
def test_what_a_known_tool_states_and_nothing_here_computes_is_refused(
    stated: dict[str, Any], what: str, checkpoint: Path
) -> None:
    message = refusal(change(checkpoint, quantization_config=stated))
    assert "'quantization_config'" in message
    assert what in message


def test_model_optimizers_own_file_counts(checkpoint: Path) -> None:
    stated = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": "W4A8_AWQ", "kv_cache_quant_algo": "FP8"},
    }
    (checkpoint / "hf_quant_config.json").write_text(json.dumps(stated))
    assert "hf_quant_config.json has 'W4A8_AWQ' for 'quant_algo'; supported: FP8" in refusal(checkpoint)
    stated["quantization"]["quant_algo"] = None  # only the cache is quantised, and that is no fact of the weights
    (checkpoint / "hf_quant_config.json").write_text(json.dumps(stated))
    LLM(str(checkpoint))


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (["adapter_config.json", "adapter_model.safetensors"], "a LoRA adapter, which is not supported yet; merge it"),
        (
            ["model-Q4_K_M.gguf", "model-Q8_0.gguf", "README.md"],
            "GGUF, the format of llama.cpp; give the path of one .gguf",
        ),
        (["params.json", "consolidated.00.pth", "tokenizer.model"], "original layout of Meta or Mistral"),
        (["train-00000-of-00001.parquet", "README.md"], "a data set, no model"),
        (["questions.jsonl"], "a data set, no model"),
        (["model_index.json"], "a diffusion pipeline"),
        (["model.safetensors"], "weights without their config.json"),
        (["model.onnx"], "ONNX"),
        (["tokenizer.json", "tokenizer_config.json"], "a tokenizer without a model"),
        (["manifest.json", "samples.safetensors"], "samples of `sametoken prepare`"),
        (["notes.txt"], "found notes.txt; expected a Hugging Face checkpoint"),
        ([], "it is empty; expected a Hugging Face checkpoint"),
    ],
)
def test_directories_without_a_configuration(names: list[str], what: str, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"{}")
    message = refusal(tmp_path)
    assert "has no config.json" in message
    assert what in message


def test_a_directory_of_checkpoints_names_one(checkpoint: Path) -> None:
    assert f"there is one in {checkpoint}" in refusal(checkpoint.parent)


def test_a_configuration_beside_other_weights(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "model.gguf").touch()
    assert "no weights" in (message := refusal(checkpoint))
    assert "GGUF" in message


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("model.safetensors", "weights alone; expected the directory"),
        ("pytorch_model.bin", "weights alone; expected the directory"),
        ("config.json", "one file of a checkpoint"),
        ("chat.jsonl", "data, no model"),
        ("model.tar", "an archive"),
        ("notes", "not a checkpoint"),
    ],
)
def test_a_file_instead_of_a_directory(name: str, what: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"GGUF")
    message = refusal(tmp_path / name)
    assert "is a file, expected a directory" in message
    assert what in message


def test_a_head_given_as_the_model(head: Path, checkpoint: Path) -> None:
    assert "holds a head" in (message := refusal(head))
    assert "--draft" in message
    # A head whose config.json says nothing: its tensors do.
    shutil.copy(head / "model.safetensors", checkpoint / "model.safetensors")
    assert "fc.weight is part of an EAGLE head; give" in refusal(checkpoint)


@pytest.mark.parametrize("command", ["export", "doctor"])
def test_a_model_given_as_a_head(command: str, tiny_pair: Pair, tmp_path: Path, run: Any) -> None:
    more = ["--output", str(tmp_path / "out")] if command == "export" else []
    answer = run(command, tiny_pair.draft, "--target", tiny_pair.target, *more)
    assert answer.code == 2
    assert "is a whole model (LlamaForCausalLM), expected a head (EAGLE-1, EAGLE-3 or Medusa)" in answer.err
    assert len(answer.err.strip().splitlines()) == 1


def test_a_model_larger_than_the_memory_is_refused_before_its_weights_are_read(checkpoint: Path) -> None:
    shape = {"hidden_size": 1 << 20, "num_attention_heads": 1 << 10, "num_hidden_layers": 100, "vocab_size": 1 << 20}
    with pytest.raises(MemoryPlanError, match=r"the weights of .* take .* GB .* are free; use quantization int8"):
        LLM(str(change(checkpoint, **shape, num_key_value_heads=1 << 10, head_dim=1 << 10)))


def test_rotary_tables_larger_than_the_memory_are_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(checkpoint, max_position_embeddings=1 << 24)
    monkeypatch.setattr("sametoken.checkpoint.memory.available_bytes", lambda device: 1 << 28)
    with pytest.raises(MemoryPlanError, match="lower max_seq_len"):
        LLM(str(checkpoint))
    assert LLM(str(checkpoint), max_seq_len=64).max_seq_len == 64


@pytest.mark.parametrize("model", [None, 5, b"x", ["a"], "", " ", "a\0b", "x" * 5000])
def test_what_is_no_name_of_a_model(model: Any, tiny_pair: Pair) -> None:
    for arguments in ((model,), (tiny_pair.target, model)):
        if arguments[-1] is None and len(arguments) == 2:
            continue  # no draft
        with pytest.raises(SametokenError) as caught:
            LLM(*arguments)
        assert len(str(caught.value)) < 400


def test_formats_are_named_in_lower_case() -> None:
    assert all(name == name.lower() for name in FORMATS)
