"""Rotary tables and rotation against transformers' own functions, bit for bit where both do the same operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV2Config, Llama4TextConfig, LlamaConfig, Phi3Config, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v2 import modeling_deepseek_v2
from transformers.models.llama4 import modeling_llama4
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding, apply_rotary_pos_emb

from sametoken.model.config import ModelConfig
from sametoken.model.rotary import apply_rope, attention_scaling, frequencies, rope_tables

SIZES = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
DIVISORS = {"short_factor": [1 + 0.05 * i for i in range(16)], "long_factor": [1 + 0.9 * i for i in range(16)]}

SCALED: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 500000.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-betas": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    "yarn-attention": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.25,
    },
}


def ours(config: PreTrainedConfig, architecture: str) -> ModelConfig:
    return ModelConfig.from_hf({**config.to_dict(), "architectures": [architecture], "dtype": "float32"})


def llama(scaling: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(**SIZES, rope_parameters={"rope_theta": 10000.0, **scaling})


def phi3(partial: float = 1.0, **rope: Any) -> Phi3Config:
    return Phi3Config(
        **SIZES,
        pad_token_id=0,
        eos_token_id=1,
        original_max_position_embeddings=64,
        rope_parameters={"rope_theta": 10000.0, "partial_rotary_factor": partial, **rope},
    )


def theirs(config: PreTrainedConfig, positions: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, dim] of transformers, all positions in one forward."""
    cos, sin = Phi3RotaryEmbedding(config)(torch.zeros(1, dtype=dtype), torch.arange(positions).unsqueeze(0))
    return cos[0], sin[0]


def close(got: Tensor, expected: Tensor, atol: float = 1e-6) -> None:
    """Equal up to the last bits of cos and sin, which vectorised loops of other shapes may round differently."""
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


def unsigned(sin: Tensor) -> Tensor:
    """transformers' sin from ours, whose first half is negated."""
    return torch.cat((-sin[..., : sin.shape[-1] // 2], sin[..., sin.shape[-1] // 2 :]), -1)


@pytest.mark.parametrize("name", SCALED)
def test_frequencies_and_scaling_equal_transformers(name: str) -> None:
    config = llama(SCALED[name])
    expected, scaling = ROPE_INIT_FUNCTIONS[SCALED[name]["rope_type"]](config, torch.device("cpu"))
    rope = ours(config, "LlamaForCausalLM").rope
    assert torch.equal(frequencies(rope, 256), expected)
    assert attention_scaling(rope) == pytest.approx(scaling, rel=1e-12)


@pytest.mark.parametrize("name", ["default", *SCALED])
def test_tables_equal_transformers(name: str) -> None:
    config = llama(SCALED.get(name, {}))
    cos, sin = rope_tables(ours(config, "LlamaForCausalLM").rope, 256)
    expected_cos, expected_sin = theirs(config, 256)
    close(cos, expected_cos)
    close(unsigned(sin), expected_sin)


def test_tables_are_rounded_once() -> None:
    rope = ours(llama(SCALED["yarn"]), "LlamaForCausalLM").rope
    rounded = rope_tables(rope, 256, dtype=torch.bfloat16)
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(rounded, rope_tables(rope, 256), strict=True))


@pytest.mark.parametrize(("max_seq_len", "which"), [(64, "short_factor"), (65, "long_factor")])
@pytest.mark.parametrize("partial", [1.0, 0.75])
def test_longrope_takes_its_factors_by_the_context_limit(max_seq_len: int, which: str, partial: float) -> None:
    pairs = int(16 * partial)
    factors = {key: values[:pairs] for key, values in DIVISORS.items()}
    config = phi3(partial, rope_type="longrope", **factors)
    rope = ours(config, "Phi3ForCausalLM").rope
    cos, sin = rope_tables(rope, max_seq_len)
    expected_cos, expected_sin = theirs(config, max_seq_len)
    close(cos, expected_cos)
    close(unsigned(sin), expected_sin)
    by_hand = 1.0 / (torch.tensor(factors[which]) * 10000.0 ** (torch.arange(pairs) / pairs))
    torch.testing.assert_close(frequencies(rope, max_seq_len), by_hand, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("given", "scaling"), [({}, None), ({"attention_factor": 1.5}, 1.5), ({"factor": 1.0}, 1.0)])
def test_longrope_attention_scaling(given: dict[str, float], scaling: float | None) -> None:
    config = phi3(1.0, rope_type="longrope", **DIVISORS, **given)
    expected = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"))[1]
    assert scaling is None or expected == scaling
    assert attention_scaling(ours(config, "Phi3ForCausalLM").rope) == pytest.approx(expected, rel=1e-12)


def test_dynamic_equals_transformers_token_by_token() -> None:
    config = llama({"rope_type": "dynamic", "factor": 2.0})
    rope = ours(config, "LlamaForCausalLM").rope
    cos, sin = rope_tables(rope, 400)
    stepwise = Phi3RotaryEmbedding(config)
    expected_cos, expected_sin = stepwise(torch.zeros(1), torch.arange(256).unsqueeze(0))
    close(cos[:256], expected_cos[0])
    close(unsigned(sin[:256]), expected_sin[0])
    for position in range(256, 400):
        one_cos, one_sin = stepwise(torch.zeros(1), torch.tensor([[position]]))
        close(cos[position], one_cos[0, 0], 1e-4)
        close(unsigned(sin[position]), one_sin[0, 0], 1e-4)
    assert not torch.allclose(cos[399], rope_tables(ours(llama({}), "LlamaForCausalLM").rope, 400)[0][399], atol=1e-2)


def test_a_longer_table_changes_no_row() -> None:
    for name in ("default", *SCALED):
        rope = ours(llama(SCALED.get(name, {})), "LlamaForCausalLM").rope
        for short, long in zip(rope_tables(rope, 37), rope_tables(rope, 256), strict=True):
            assert torch.equal(short, long[:37])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("partial", [1.0, 0.75, 0.25])
def test_rotation_gives_the_bits_of_transformers(dtype: torch.dtype, partial: float) -> None:
    generator = torch.Generator().manual_seed(0)
    config = phi3(partial, rope_type="default")
    q = torch.randn(1, 4, 50, 32, generator=generator).to(dtype)
    k = torch.randn(1, 2, 50, 32, generator=generator).to(dtype)
    expected_q, expected_k = apply_rotary_pos_emb(q, k, *theirs(config, 50, dtype), unsqueeze_dim=0)
    cos, sin = rope_tables(ours(config, "Phi3ForCausalLM").rope, 50, dtype=dtype)
    fused = torch.cat((q, k), 1)[0].transpose(0, 1)
    before = fused.clone()
    out = apply_rope(fused, cos.unsqueeze(1), sin.unsqueeze(1)).transpose(0, 1)
    assert torch.equal(out[:4], expected_q[0])
    assert torch.equal(out[4:], expected_k[0])
    assert torch.equal(fused, before)


@pytest.mark.parametrize("family", ["Llama4ForCausalLM", "DeepseekV2ForCausalLM"])
def test_complex_rotation_gives_the_bits_of_transformers_in_bfloat16(family: str) -> None:
    if family == "Llama4ForCausalLM":
        config: Any = Llama4TextConfig(**SIZES, head_dim=32, num_key_value_heads=2)
        q, k = torch.randn(2, 1, 50, 4, 32, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
        freqs = modeling_llama4.Llama4TextRotaryEmbedding(config)(q, torch.arange(50).unsqueeze(0))
        expected = modeling_llama4.apply_rotary_emb(q, k, freqs)
    else:
        config = DeepseekV2Config(**SIZES, qk_rope_head_dim=32, num_key_value_heads=4, num_experts_per_tok=2)
        q, k = torch.randn(2, 1, 50, 4, 32, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
        freqs = modeling_deepseek_v2.DeepseekV2RotaryEmbedding(config)(q, torch.arange(50).unsqueeze(0))
        turned = modeling_deepseek_v2.apply_rotary_emb(q.transpose(1, 2), k.transpose(1, 2), freqs)
        expected = tuple(each.transpose(1, 2) for each in turned)
    rope = ours(config, family).rope
    cos, sin = (table.unsqueeze(1) for table in rope_tables(rope, 50, dtype=torch.bfloat16))
    for x, wanted in zip((q[0], k[0]), expected, strict=True):
        found = apply_rope(x, cos, sin, interleaved=rope.interleaved)
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, wanted[0])


def test_rotation_keeps_distances_only() -> None:
    """A query and a key turned by the same number of positions keep their product: the point of a rotary embedding."""
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 1, 1, 32, generator=generator)
    cos, sin = (x.unsqueeze(1) for x in rope_tables(ours(llama({}), "LlamaForCausalLM").rope, 64))
    products = [
        (apply_rope(q, cos[i : i + 1], sin[i : i + 1]) * apply_rope(k, cos[i + 5 : i + 6], sin[i + 5 : i + 6])).sum()
        for i in range(50)
    ]
    torch.testing.assert_close(torch.stack(products), products[0].expand(50), rtol=0, atol=1e-4)
