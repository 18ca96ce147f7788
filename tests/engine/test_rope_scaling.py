"""RoPE by option in an engine: tokens of transformers beyond the file's positions, drafts, ranks and saved prompts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_models
from engine_checks import PLAIN, make_llm, save_pair, sharpen
from sametoken import LLM, SamplingParams
from sametoken.engine.saved import keep, read, write
from sametoken.errors import ConfigError, DataError

GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 96}
STRETCHED: dict[str, Any] = {"rope_scaling": YARN, "max_seq_len": 190}
PROMPT = torch.randint(3, 90, (120,), generator=torch.Generator().manual_seed(5)).tolist()  # the file has 128 positions


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return save_pair("llama-3", tmp_path_factory.mktemp("pair"), 0.02)


def theirs() -> list[int]:
    """Greedy tokens of transformers with this RoPE in config.json."""
    model = sharpen(tiny_models.build("llama-3", rope_parameters={**YARN, "rope_theta": 500000.0}))
    out = model.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=40, pad_token_id=0)
    return [int(token) for token in out[0, len(PROMPT) :]]


@pytest.mark.parametrize("ranks", [1, 2])
def test_tokens_are_those_of_transformers_with_and_without_drafts(models: tuple[str, str], ranks: int) -> None:
    with make_llm(*models, tensor_parallel_size=ranks, draft_tensor_parallel_size=ranks, **STRETCHED) as llm:
        assert llm.config.rope.kind == "yarn"
        (drafted,) = llm.generate([PROMPT], GREEDY)
        assert drafted.token_ids == theirs()
        assert llm.generate([PROMPT], replace(GREEDY, speculative=PLAIN))[0].token_ids == drafted.token_ids
        assert drafted.speculation.acceptance_length > 1.5


def test_a_draft_model_of_this_family_and_context_has_it_too(
    models: tuple[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def kind_of(draft: str) -> str:
        with make_llm(models[0], draft, **STRETCHED) as llm:
            drafter: Any = llm.engine.drafters["draft_target"]
            assert llm.generate([PROMPT], GREEDY)[0].token_ids == theirs()
            return str(drafter.decoder.config.rope.kind)

    assert kind_of(models[1]) == "yarn"
    _, other = save_pair("llama-3", tmp_path)
    file = Path(other) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "max_position_embeddings": 256}))
    assert kind_of(other) == "default"


def test_a_longer_context_needs_it(models: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"exceeds the 128 positions .*; lower it, or set rope_scaling to stretch"):
        make_llm(models[0], max_seq_len=190)
    for kind in ("yarn", {"rope_type": "yarn", "original_max_position_embeddings": 96}):
        with pytest.raises(ConfigError, match="rope_type 'yarn' needs factor; give it too"):
            make_llm(models[0], rope_scaling=kind)
    theirs: dict[str, Any] = {"hf_overrides": {"rope_parameters": YARN}}
    with LLM(models[0], dtype="float32", **theirs) as llm:
        assert llm.max_seq_len == 192
    with pytest.raises(ConfigError, match="max_seq_len 193 exceeds the 192 positions"):
        make_llm(models[0], rope_scaling=YARN, max_seq_len=193)


def test_a_longer_context_may_be_lowered(models: tuple[str, str], caplog: pytest.LogCaptureFixture) -> None:
    with make_llm(models[0], max_seq_len=190, cap_max_seq_len=True) as llm:
        assert llm.max_seq_len == 128
    assert "exceeds the 128 positions" in caplog.text
    assert "is lowered to them" in caplog.text
    with make_llm(models[0], max_seq_len=190, cap_max_seq_len=True, rope_scaling=YARN) as llm:
        assert llm.max_seq_len == 190


def test_a_saved_prompt_of_another_rope_is_refused(models: tuple[str, str], tmp_path: Path) -> None:
    file = tmp_path / "prompt.bin"
    plain, stretched = make_llm(models[0]), make_llm(models[0], rope_scaling=YARN)
    prompt = PROMPT[:50]
    plain.generate([prompt], replace(GREEDY, max_tokens=2))
    write(keep(plain.engine, prompt), file, plain.fingerprint())
    with pytest.raises(DataError, match="another model, draft, number format"):
        read(stretched.engine, file, stretched.fingerprint())
    again = make_llm(models[0], rope_scaling=dict(reversed(YARN.items())))
    assert again.fingerprint() == stretched.fingerprint()
