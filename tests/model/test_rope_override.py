"""RoPE by option: the logits of transformers with the same values in config.json, and contexts; what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_families import DEVICE, TOLERANCE, Sequence

import tiny_models
from sametoken.checkpoint.load import load_decoder
from sametoken.errors import ConfigError
from sametoken.model.config import ModelConfig
from sametoken.model.keys import MOST_POSITIONS
from sametoken.model.rope_config import CHANGED, ROPE_KINDS
from sametoken.options.rope import read_rope_scaling

ORIGINAL, POSITIONS = "original_max_position_embeddings", "max_position_embeddings"
LENGTH = 140  # more tokens than the 128 positions of the tiny models
YARN = {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 48}
LINEAR = {"rope_type": "linear", "factor": 3.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: 32}
TYPED = "full_attention"
LAYERS = tiny_models.LAYERS
# Families, what is given, and RoPE in a config.json that means the same.
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama-3", YARN, {"rope_theta": 500000.0, **YARN}),
    ("llama-3", {**YARN, "beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 0.8, "truncate": False},
     {"rope_theta": 500000.0, **YARN, "beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 0.8, "truncate": False}),
    ("llama-3", {"rope_type": "yarn", "factor": 2.0}, {"rope_theta": 500000.0, **YARN, "factor": 2.0, ORIGINAL: 128}),
    ("llama-3", {"factor": 3.0}, {"rope_theta": 500000.0, **LINEAR}),
    ("llama-3", LLAMA3, {"rope_theta": 500000.0, **LLAMA3}),
    ("llama-3", {"rope_theta": 777.0}, {"rope_type": "default", "rope_theta": 777.0}),
    ("qwen-3", YARN, {"rope_theta": 10000.0, **YARN}),
    ("qwen-3", {**YARN, "rope_theta": 5000.0}, {**YARN, "rope_theta": 5000.0}),
    ("llama-yarn", {"factor": 2.0}, {**YARN, "rope_theta": 10000.0, "factor": 2.0, ORIGINAL: 32}),
    ("llama-yarn", {"rope_type": "default"}, {"rope_type": "default", "rope_theta": 10000.0}),
    ("llama-3.1", YARN, {"rope_theta": 500000.0, **YARN}),
    ("gemma-3", YARN, {**LAYERS, TYPED: {**YARN, "rope_theta": 50000.0}}),
    ("olmo-3", LINEAR, {**LAYERS, TYPED: {**LINEAR, "rope_theta": 50000.0}}),
]  # fmt: skip


@pytest.mark.parametrize(("family", "given", "meant"), CASES, ids=lambda value: str(value)[:50])
def test_logits_are_those_of_a_file_that_states_it(
    family: str, given: dict[str, Any], meant: dict[str, Any], tmp_path: Path
) -> None:
    tiny_models.save(family, tmp_path)
    model = tiny_models.build(family, rope_parameters=meant)
    ids = torch.randint(tiny_models.VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(3)).tolist()
    decoder = load_decoder(tmp_path, torch.float32, DEVICE, LENGTH, rope_scaling=given)
    plain = load_decoder(tmp_path, torch.float32, DEVICE, LENGTH)
    pages = tuple(range(1, 10))
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
        found = Sequence(decoder, pages).extend(ids)
        other = Sequence(plain, pages).extend(ids)
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=TOLERANCE)
    assert (other.cpu() - expected).abs().max() > 100 * TOLERANCE  # so that the option is what makes them equal


STATED = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 9, "hidden_size": 64, "intermediate_size": 8,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, POSITIONS: 40960, "rope_theta": 1e6,
}  # fmt: skip


@pytest.mark.parametrize(
    ("given", "positions"),
    [
        ({"rope_type": "yarn", "factor": 4.0, ORIGINAL: 32768}, 131072),  # of the model's card
        ({"rope_type": "yarn", "factor": 4.0}, 163840),
        ({"rope_type": "yarn", "factor": 1.0, ORIGINAL: 32768}, 40960),
        ({"factor": 2.5}, 102400),
        ({"rope_type": "dynamic", "factor": 2.0}, 81920),
        ({"rope_type": "yarn", "factor": 4.0, ORIGINAL: 32768, POSITIONS: 65536}, 65536),
        ({POSITIONS: 262144}, 262144),
        ({"rope_theta": 5e6}, 40960),
    ],
)
def test_the_context_follows(given: dict[str, Any], positions: int) -> None:
    config = ModelConfig.from_hf(STATED, None, given)
    assert config.max_position == positions
    assert config.rope.theta == given.get("rope_theta", 1e6)
    assert ModelConfig.from_hf(STATED, 77, given).max_position == 77


@pytest.mark.parametrize(
    ("stated", "given", "words"),
    [
        ({}, {"factor": 1e20}, f"more than {MOST_POSITIONS} positions"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}},
         YARN, "RoPE of kind 'longrope', which it cannot replace"),
        ({"architectures": ["Phi3ForCausalLM"], "head_dim": None}, YARN, "got 'yarn' for a model of family phi3"),
    ],
)  # fmt: skip
def test_what_a_model_cannot_have_is_refused(stated: dict[str, Any], given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"rope_scaling: .*{words}"):
        ModelConfig.from_hf({**STATED, **stated}, None, given)


def test_the_option_has_the_kinds_that_may_be_given() -> None:
    assert {*ROPE_KINDS} - {*CHANGED} == {"longrope"}
    for kind in CHANGED:
        whole = {**LLAMA3, "rope_type": kind}
        assert read_rope_scaling(whole) == whole
    assert read_rope_scaling('{"type": "yarn", "factor": 2}') == {"rope_type": "yarn", "factor": 2}
    assert read_rope_scaling("default") == {"rope_type": "default"}
    assert read_rope_scaling({}) is read_rope_scaling(None) is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("longrope", "rope_type = 'longrope': expected 'default', 'linear'"),
        ('{"rope_type": "linear"}', "rope_type 'linear' needs factor"),
        ({"factor": 0}, "factor = 0: expected a value greater than 0"),
        ({"factor": float("nan")}, "factor = nan"),
        ({"factor": "4"}, "factor = '4'"),
        ({ORIGINAL: 1 << 30}, "expected a value less than"),
        ({"long_factor": [1.0]}, "unknown RopeScaling key 'long_factor'"),
        ({3: 4}, "unknown RopeScaling key '3'"),
        ("{" * 100000, "expected a JSON object"),
        ([1], "expected keys and values"),
        ({"full_attention": YARN}, "unknown RopeScaling key 'full_attention'"),
    ],
)
def test_values_are_refused_by_name(given: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_rope_scaling(given)
