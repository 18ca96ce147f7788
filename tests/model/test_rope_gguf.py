"""RoPE of llama-server's command line over a GGUF file: what transformers computes with the same values."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from test_families import TOLERANCE, Sequence
from test_rope_override import LENGTH

import tiny_models
from gguf_makers import write_gguf
from sametoken.checkpoint.hub import resolve
from sametoken.checkpoint.load import load_decoder
from sametoken.dialects.llama_door import llama_server
from sametoken.errors import ConfigError


@pytest.fixture(autouse=True)
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves nothing in the user's cache."""
    monkeypatch.setattr("sametoken.checkpoint.hub.opened_directory", lambda: tmp_path / "opened")


def made(file: Path, family: str) -> Path:
    write_gguf(file, tiny_models.build(family), lambda name: gguf.GGMLQuantizationType.F32)
    return resolve(str(file))


@pytest.mark.parametrize(
    ("family", "words", "rope"),
    [
        ("qwen-3", "--rope-scaling yarn --rope-scale 4 --yarn-orig-ctx 48",
         {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 48}),
        ("qwen-3", "--rope-scaling yarn --rope-freq-scale 0.5 --yarn-beta-fast 8",
         {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128, "beta_fast": 8.0}),
        ("qwen-3", "--rope-scale 2 --rope-freq-base 5000", {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000}),
        ("llama-yarn", "--rope-scale 2",
         {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}),
        ("llama-yarn", "--rope-scaling none", {"rope_type": "default"}),
    ],
)  # fmt: skip
def test_a_file_is_stretched_as_a_checkpoint_is(family: str, words: str, rope: dict[str, Any], tmp_path: Path) -> None:
    given = llama_server(shlex.split(words), {}).rope
    decoder = load_decoder(made(tmp_path / "m.gguf", family), torch.float32, "cpu", LENGTH, rope_scaling=given)
    model = tiny_models.build(family, rope_parameters={"rope_theta": 10000.0, **rope})
    ids = torch.randint(tiny_models.VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(4)).tolist()
    with torch.inference_mode():
        found = Sequence(decoder, tuple(range(1, 10))).extend(ids)
        expected = model(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


def test_a_file_with_a_divisor_for_each_frequency_keeps_them(tmp_path: Path) -> None:
    place = made(tmp_path / "m.gguf", "llama-3.1")
    with pytest.raises(ConfigError, match=r"rope_scaling: got 'yarn' .* kind 'longrope', which it cannot replace"):
        load_decoder(place, torch.float32, "cpu", rope_scaling={"rope_type": "yarn", "factor": 2.0})
    assert load_decoder(place, torch.float32, "cpu", rope_scaling={"rope_theta": 9.0}).config.rope.theta == 9.0
