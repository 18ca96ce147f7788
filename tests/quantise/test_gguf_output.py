"""GGUF files that `sametoken quantize` writes: the library gguf and our own reader find the same in them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from cli_checks import call, speak
from sametoken import LLM, SamplingParams
from sametoken.checkpoint.gguf.directory import directory_of
from sametoken.checkpoint.gguf.splitting import LLAMA3, QWEN2
from sametoken.checkpoint.load import load_decoder, read_weights
from sametoken.checkpoint.tokenizer_files import load_tokenizer
from sametoken.model.formats.coded import Coded
from sametoken.prompts.sources import BUILT_IN
from sametoken.quantise.report import REPORT

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES: dict[str, Any] = {
    "vocab_size": 400, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "initializer_range": 0.2,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
MODELS = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 1e5, "factor": 2.0}),
}


def byte_pairs(place: Path, split: str, **settings: Any) -> None:
    """Adds a trained tokenizer of byte pairs that splits texts by an expression."""
    backend = Tokenizer(models.BPE(**settings))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated"), level])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=390, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    backend.train_from_iterator([*BUILT_IN, "numbers 1234 5678 12 34 5"], trainer)
    backend.save(str(place / "tokenizer.json"))
    settings_file = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (place / "tokenizer_config.json").write_text(json.dumps(settings_file))


def saved(place: Path, name: str, split: str = QWEN2[0]) -> Path:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(MODELS[name], dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.save_pretrained(place)
    byte_pairs(place, split)
    return place


def written(capfd: pytest.CaptureFixture[str], source: Path, place: Path, format: str) -> Path:
    answer = call(capfd, "quantize", str(source), "--format", format, "--output", str(place))
    assert answer.code == 0, answer.err
    assert sorted(file.name for file in place.iterdir()) == [f"model-{format[5:]}.gguf", REPORT]
    return place / f"model-{format[5:]}.gguf"


@pytest.mark.parametrize("format", ["gguf-q8_0", "gguf-q4_0"])
@pytest.mark.parametrize("name", MODELS)
def test_the_library_reads_what_we_read(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, name: str, format: str
) -> None:
    source = saved(tmp_path / "plain", name)
    file = written(capfd, source, tmp_path / "q", format)
    reader = gguf.GGUFReader(file)
    assert reader.get_field("general.architecture").contents() == name
    theirs = {tensor.name: tensor for tensor in reader.tensors}
    kinds = {theirs[key].tensor_type.name for key in theirs if key.startswith("blk.") and key.endswith("proj.weight")}
    assert kinds <= {format[5:].upper()}
    directory = directory_of(file, tmp_path / "opened")
    ours = {item.name: item.tensor for item in read_weights(directory)}
    assert len(ours) == len(theirs)
    for key, tensor in theirs.items():
        if ".attn_q." in key or ".attn_k." in key:  # rows of llama are in another order
            continue
        meant = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        names = {"token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm"}
        module, _, kind = key.rpartition(".")
        parts = {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "attn_output": "self_attn.o_proj"}
        if module in names:
            found = ours[f"{names[module]}.{kind}"]
        elif (part := module.split(".")[-1]) in parts:
            found = ours[f"model.layers.{module.split('.')[1]}.{parts[part]}.{kind}"]
        else:
            continue
        assert torch.equal(found.dequantize() if isinstance(found, Coded) else found.float(), meant), key
    config = MODELS[name]
    decoder = load_decoder(directory, torch.float32, "cpu")
    assert decoder.config.rope.theta == config.rope_parameters["rope_theta"]
    plain = load_decoder(source, torch.float32, "cpu").config
    assert decoder.config.rope == plain.rope
    assert (decoder.config.qkv_bias, decoder.config.qk_norm) == (plain.qkv_bias, plain.qk_norm)


@pytest.mark.parametrize("name", MODELS)
def test_eight_bits_write_what_the_plain_model_writes(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    """Rows of q and k in a wrong order would change every text."""
    source = saved(tmp_path / "plain", name)
    file = written(capfd, source, tmp_path / "q", "gguf-q8_0")
    setting = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    prompts = ["Tell me a story", "numbers 1234"]
    plain, small = (LLM(str(model), dtype="float32").generate(prompts, setting) for model in (source, file))
    same = sum(
        one == other
        for a, b in zip(plain, small, strict=True)
        for one, other in zip(a.token_ids, b.token_ids, strict=True)
    )
    assert same > 12


@pytest.mark.parametrize("split", [LLAMA3[0], QWEN2[0]], ids=["llama3", "qwen2"])
def test_the_tokenizer_is_the_same(capfd: pytest.CaptureFixture[str], tmp_path: Path, split: str) -> None:
    source = saved(tmp_path / "plain", "llama", split)
    file = written(capfd, source, tmp_path / "q", "gguf-q8_0")
    before, after = load_tokenizer(source), load_tokenizer(directory_of(file, tmp_path / "opened"))
    for text in ["1234567 89", "It's we'LL", "a\n\n  b\t", "Größe 東京 🙂", *BUILT_IN]:
        assert before.encode(text) == after.encode(text)
    assert before.eos_ids == after.eos_ids


def test_what_cannot_be_written_is_named(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def refused(config: Any, name: str, split: str | None = QWEN2[0]) -> str:
        place = tmp_path / name
        AutoModelForCausalLM.from_config(config).save_pretrained(place)
        if split is None:
            speak(place)
        else:
            byte_pairs(place, split)
        answer = call(capfd, "quantize", str(place), "--format", "gguf-q8_0", "--output", str(tmp_path / "out"))
        assert answer.code == 2
        assert not (tmp_path / "out").exists()
        return answer.err

    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    assert "Qwen3MoeForCausalLM cannot be written as GGUF" in refused(Qwen3MoeConfig(**SIZES, **moe), "moe")
    windows = Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    assert "sliding windows" in refused(windows, "windows")
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}
    assert "RoPE of kind yarn" in refused(LlamaConfig(**SIZES, rope_parameters=yarn), "yarn")
    words = "no tokenizer that GGUF files can name splits texts as this one does"
    assert words in refused(MODELS["llama"], "vowels", r"[aeiou]+|[^aeiou]+")
    assert words in refused(MODELS["llama"], "letters", None)
    assert re.search("multiple of 32", refused(LlamaConfig(**{**SIZES, "intermediate_size": 88}), "odd"))
