"""The widened and deepened checkpoint says what its source says, with transformers as the oracle."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from deepen import Shape, deepen, write_shards

from sametoken.errors import ConfigError, UnsupportedModelError

PROMPT = torch.tensor([[1, 17, 5, 90, 33, 64, 2, 8]])


def tiny(path: Path, *, tied: bool, dtype: torch.dtype = torch.float32, kv_heads: int = 2) -> Path:
    """A random Llama of two layers whose norms are not ones."""
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=16,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.to(dtype).save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    return path


def logits_and_text(path: Path) -> tuple[torch.Tensor, list[int]]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(PROMPT).logits
        out = model.generate(PROMPT, do_sample=False, max_new_tokens=24, min_new_tokens=24, pad_token_id=0)
    return logits, out[0].tolist()


@pytest.mark.parametrize(("tied", "kv_copies"), [(True, 4), (True, 1), (False, 2)])
def test_logits_and_greedy_text_stay(tmp_path: Path, tied: bool, kv_copies: int) -> None:
    source = tiny(tmp_path / "source", tied=tied)
    config = deepen(source, tmp_path / "out", 4, kv_copies, 400_000)
    assert config["hidden_size"] == 128
    assert config["num_key_value_heads"] == 2 * kv_copies
    assert config["num_hidden_layers"] > 2
    before, text_before = logits_and_text(source)
    after, text_after = logits_and_text(tmp_path / "out")
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4 * before.abs().max().item())
    assert text_after == text_before
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


def test_the_parameter_count_is_reached_with_the_fewest_blocks(tmp_path: Path) -> None:
    source = tiny(tmp_path / "source", tied=True)
    wide = deepen(source, tmp_path / "wide", 2, None, 0)
    deep = deepen(source, tmp_path / "deep", 2, None, 150_000)
    counts = {
        name: sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(tmp_path / name).parameters())
        for name in ("wide", "deep")
    }
    assert wide["num_hidden_layers"] == 2
    per_block = (counts["deep"] - counts["wide"]) // (deep["num_hidden_layers"] - 2)
    assert 150_000 <= counts["deep"] < 150_000 + per_block


def test_appended_blocks_are_neither_zero_nor_copies(tmp_path: Path) -> None:
    source = tiny(tmp_path / "source", tied=True, dtype=torch.bfloat16)
    deepen(source, tmp_path / "out", 2, None, 150_000)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    first, third, fourth = (model.model.layers[i] for i in (0, 2, 3))
    assert model.dtype == torch.bfloat16
    assert not third.mlp.down_proj.weight.any()
    assert not third.self_attn.o_proj.weight.any()
    for one, other in ((first, third), (third, fourth)):
        assert not torch.equal(one.mlp.up_proj.weight, other.mlp.up_proj.weight)
    ratio = third.mlp.up_proj.weight.float().std() / first.mlp.up_proj.weight.float().std()
    assert 0.8 < ratio < 1.2


def test_bfloat16_weights_are_divided_exactly(tmp_path: Path) -> None:
    source = tiny(tmp_path / "source", tied=True, dtype=torch.bfloat16)
    deepen(source, tmp_path / "out", 8, None, 0)
    small = AutoModelForCausalLM.from_pretrained(source).model.layers[1].mlp.down_proj.weight
    large = AutoModelForCausalLM.from_pretrained(tmp_path / "out").model.layers[1].mlp.down_proj.weight
    assert torch.equal(large[32:64, 48:96].float() * 8, small.float())


def test_query_heads_stay_under_copies_of_their_key_head() -> None:
    shape = Shape(layers=1, heads=6, kv_heads=3, head_dim=4, copies=4, kv_copies=2)
    order = shape.query_order()
    per_key = len(order) // (shape.kv_heads * shape.kv_copies)
    for place, head in enumerate(order):
        assert head // 2 == place // per_key % shape.kv_heads
    assert all(order.count(head) == 4 for head in range(6))


def test_shards_stay_below_their_size_and_are_indexed(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((100,), float(i)) for i in range(7)}
    write_shards(tensors.items(), tmp_path, shard_bytes=1000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"]["total_size"] == 2800
    assert len(set(index["weight_map"].values())) == 4
    for file in index["weight_map"].values():
        assert (tmp_path / file).stat().st_size < 1000 + 600  # the header


def test_what_cannot_be_widened_is_refused(tmp_path: Path) -> None:
    source = tiny(tmp_path / "source", tied=True)
    with pytest.raises(ConfigError, match="power of two"):
        deepen(source, tmp_path / "out", 3, None, 0)
    with pytest.raises(ConfigError, match="does not divide"):
        deepen(source, tmp_path / "out", 2, 4, 0)
    with pytest.raises(ConfigError, match="already holds"):
        deepen(source, source, 2, None, 0)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"model_type": "qwen3"}))
    with pytest.raises(UnsupportedModelError, match="qwen3"):
        deepen(source, tmp_path / "out", 2, None, 0)
