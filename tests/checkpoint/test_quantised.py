"""Checkpoints that other tools quantised: what is read is what they mean, and the model computes with exactly that.

Oracles: the numbers that `quantised_makers` had before it packed them, and transformers with those numbers in float32.
What the tools' own readers say of their own files: test_quantised_peers.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

import tiny_models
from native_checks import BUILT, use
from quantised_makers import MADE, quantised
from sametoken.checkpoint.load import load_decoder, read_weights
from sametoken.checkpoint.quantised.layouts import coded
from sametoken.checkpoint.quantised.scheme import read_scheme
from sametoken.model.decoder import Decoder
from sametoken.model.formats.coded import Coded, joined
from sametoken.runtime.cache import KVCache, PageTable, Span
from sametoken.speculation.draft import ancestors

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128, "initializer_range": 0.1,
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen 3 model in float32."""
    folder = tmp_path_factory.mktemp("plain")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen3Config(**SIZES)).save_pretrained(folder)
    return folder


def layer_of(name: str) -> Any:
    scheme = read_scheme({"quantization_config": MADE[name].config}, None)
    assert scheme is not None
    return scheme.layer("model.layers.0.mlp.up_proj"), scheme.tool


@pytest.mark.parametrize("name", MADE)
def test_what_is_read_is_what_was_written(name: str) -> None:
    for shape in ((64, 128), (96, 256)):
        parts, meant = MADE[name].make(torch.randn(*shape, generator=torch.Generator().manual_seed(2)))
        found = coded(parts, *layer_of(name))
        assert found.shape == shape
        assert torch.equal(found.dequantize(), meant)


@pytest.mark.parametrize("name", MADE)
def test_parts_of_a_fused_product_are_joined_without_loss(name: str) -> None:
    weights = [torch.randn(64, 128, generator=torch.Generator().manual_seed(i)) * 3**i for i in range(3)]
    made = [MADE[name].make(weight) for weight in weights]
    whole = joined([coded(parts, *layer_of(name)) for parts, _ in made])
    assert torch.equal(whole.dequantize(), torch.cat([meant for _, meant in made]))


def logits(decoder: Decoder, tokens: Tensor, pieces: tuple[int, ...]) -> Tensor:
    """[T, V] of a prompt that is read in pieces."""
    table = PageTable(1, 9, 8, 16, "cpu")
    table.extend(0, list(range(1, 9)))
    cache = KVCache.of(decoder.config, table, decoder.dtype, "cpu")
    found, start = [], 0
    for count in pieces:
        parents = torch.arange(-1, count - 1).unsqueeze(0)
        span = Span(torch.tensor([0]), [0], torch.tensor([start]), ancestors(parents), count, start + count)
        hidden = decoder(tokens[start : start + count], cache, cache.view([span]))
        found.append(decoder.logits(hidden.last))
        start += count
    return torch.cat(found)


def in_eight_bits(module: torch.nn.Module, inputs: tuple[Tensor]) -> Tensor:
    """Rows as W8A8 takes them: rounded to 255 steps of their greatest number."""
    step = inputs[0].abs().amax(-1, keepdim=True) / 127
    return (inputs[0] / step).round() * step


@pytest.mark.parametrize("name", MADE)
@torch.inference_mode()
def test_models_compute_with_what_is_stored(name: str, plain: Path, tmp_path: Path) -> None:
    directory = quantised(plain, name, tmp_path / "quantised", tmp_path / "meant")
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path / "meant", dtype=torch.float32)
    if name == "w8a8":
        for module_name, module in oracle.named_modules():
            if module_name.endswith("_proj"):
                module.register_forward_pre_hook(in_eight_bits)
    tokens = torch.randint(0, 96, (40,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = oracle(tokens.unsqueeze(0)).logits[0]
    exact = logits(load_decoder(directory, torch.float32, "cpu"), tokens, (40,))
    # Where rows are rounded to eight bits, the last bit of a float may round a number to the next one.
    assert (exact - expected).norm() <= (0.005 if name == "w8a8" else 1e-5) * expected.norm()
    narrow = logits(load_decoder(directory, torch.bfloat16, "cpu"), tokens, (40,)).float()
    assert (narrow - expected).norm() <= (0.06 if name == "w8a8" else 0.02) * expected.norm()


@pytest.mark.skipif(not BUILT, reason="no compiled kernels")
@pytest.mark.parametrize("name", MADE)
@torch.inference_mode()
def test_whole_models_run_compiled_with_the_same_bits_in_any_company(
    name: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = quantised(plain, name, tmp_path / "quantised")
    tokens = torch.randint(0, 96, (40,), generator=torch.Generator().manual_seed(1))
    for kernels in BUILT:
        decoder = load_decoder(directory, torch.bfloat16, "cpu") if use(kernels, monkeypatch) else None
        assert decoder is not None
        assert decoder.native is not None
        whole = logits(decoder, tokens, (40,))
        assert torch.equal(whole, logits(decoder, tokens, (1, 2, 3, 5, 8, 9, 12)))


@pytest.mark.parametrize("name", MADE)
def test_weights_stay_as_small_as_they_are_stored(name: str, plain: Path, tmp_path: Path) -> None:
    directory = quantised(plain, name, tmp_path / "quantised")
    found = [item.tensor for item in read_weights(directory) if isinstance(item.tensor, Coded)]
    assert len(found) == 2 * 7
    decoder = load_decoder(directory, torch.bfloat16, "cpu")
    four = 4 in (each.codes.dtype.itemsize * 8 * each.codes.shape[1] // each.inputs for each in found)
    for linear in (layer for block in decoder.blocks for layer in (block.qkv, block.out, block.gate_up, block.down)):
        held = linear.coded.nbytes if linear.native is None else linear.native.nbytes
        assert held <= linear.in_features * linear.out_features * (0.85 if four else 1.35)


def test_a_biased_model_keeps_its_biases(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "plain")
    directory = quantised(tmp_path / "plain", "gptq", tmp_path / "quantised", tmp_path / "meant")
    tokens = torch.arange(20)
    with torch.inference_mode():
        expected = AutoModelForCausalLM.from_pretrained(tmp_path / "meant")(tokens.unsqueeze(0)).logits[0]
        found = logits(load_decoder(directory, torch.float32, "cpu"), tokens, (20,))
    assert (found - expected).norm() <= 1e-5 * expected.norm()


@torch.inference_mode()
def test_deepseek_as_published(tmp_path: Path) -> None:
    """FP8 in blocks of 128 x 128, which weights end within; W_k and W_v of the heads become numbers."""
    sizes = {
        "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128, "kv_lora_rank": 128,
        "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64, "q_lora_rank": 96,
    }  # fmt: skip
    tiny_models.build("deepseek-v3", **sizes).save_pretrained(tmp_path / "source")
    quantised(tmp_path / "source", "fp8-deepseek", tmp_path / "fp8", tmp_path / "plain")
    tokens = torch.randint(tiny_models.VOCAB, (40,), generator=torch.Generator().manual_seed(1))
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    expected = oracle(tokens.unsqueeze(0)).logits[0]
    exact = logits(load_decoder(tmp_path / "fp8", torch.float32, "cpu"), tokens, (30, 10))
    assert (exact - expected).norm() <= 1e-5 * expected.norm()
    unrounded = logits(load_decoder(tmp_path / "source", torch.float32, "cpu"), tokens, (40,))
    assert (unrounded - expected).norm() >= 1e-3 * expected.norm()
