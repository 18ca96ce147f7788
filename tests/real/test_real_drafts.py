"""Drafts, company and kept weights change no token of published models: every drafter, many sampling parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from real_files import CACHE_VARIABLE, gguf, needs_models

from sametoken import LLM, SamplingParams
from sametoken.checkpoint import weight_cache

pytestmark = needs_models
NAMES = "alpha", "beta", "gamma", "delta", "omega", "sigma", "kappa", "theta"
GETTERS = [f"    def get_{name}(self):\n        return self.{name}\n\n" for name in NAMES]
LOAD = "import json\n\ndef load(path):\n    with open(path) as file:\n        return json.load(file)\n\ndef save("
# Of different lengths, and with lines that repeat, so that guesses from the text are right and wrong.
PROMPTS = [f"class Point:\n{''.join(GETTERS[:at])}    def get_{NAMES[at]}(self):\n" for at in range(1, 8)] + [LOAD]
TOKENS = 16
PARAMS = [
    {"temperature": 0},
    {"temperature": 0.7, "seed": 1},
    {"temperature": 0.7, "seed": 2, "top_p": 0.9},
    {"temperature": 0.7, "seed": 3, "min_p": 0.05},
    {"temperature": 1, "seed": 4, "top_k": 40, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 0, "repetition_penalty": 1.1},
    {"temperature": 0, "logit_bias": {198: -5.0}},
    {"temperature": 1.3, "seed": 7, "top_p": 0.8, "min_tokens": 8},
]
DRAFTERS: dict[str, tuple[bool, dict[str, Any]]] = {  # whether there is a draft model, and how drafts are made
    "suffix": (False, {"method": "suffix", "adaptive": False}),
    "ngram": (False, {"method": "ngram", "adaptive": False}),
    "fixed": (True, {"max_draft_len": 4, "adaptive": False}),
    "vocabulary": (True, {"max_draft_len": 4, "adaptive": False, "draft_vocab_size": 16384}),
    "tree": (True, {"max_draft_len": 3, "tree_top_k": 2, "adaptive": False}),
    "auto": (True, {"method": "auto"}),
}


def opened(draft: bool, how: dict[str, Any]) -> LLM:
    return LLM(gguf("coder15"), gguf("coder05") if draft else None, how, max_batch_size=8, max_seq_len=512)


def said(llm: LLM, batch: int) -> tuple[list[list[int]], int]:
    """The tokens of each request, so many at once, and how many of them were drafted."""
    params = [SamplingParams(max_tokens=TOKENS, **each) for each in PARAMS]
    found = []
    for at in range(0, len(PROMPTS), batch):
        found += llm.generate(PROMPTS[at : at + batch], params[at : at + batch])
    return [each.token_ids for each in found], sum(sum(each.origins) for each in found)


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    """What plain decoding says, one request at a time."""
    with opened(False, {"method": "none"}) as llm:
        tokens, drafted = said(llm, 1)
        assert drafted == 0
        assert said(llm, 8)[0] == tokens
    weight_cache.finish()
    return tokens


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_change_no_token(name: str, plain: list[list[int]]) -> None:
    with opened(*DRAFTERS[name]) as llm:
        for batch in (1, 8):
            tokens, drafted = said(llm, batch)
            assert tokens == plain, f"in batches of {batch}"
            assert drafted > (0 if name == "auto" else 4), "too few guesses came true to say anything"
    weight_cache.finish()


@pytest.mark.parametrize("name", ["coder05", "smollm2", "gemma3"])
def test_kept_weights_change_no_token(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a cache, with one that is written, and mapped from it."""

    def tokens() -> list[list[int]]:
        with LLM(gguf(name), None, {"method": "none"}, max_batch_size=4, max_seq_len=256) as llm:
            params = [SamplingParams(max_tokens=TOKENS, **each) for each in PARAMS[:4]]
            found = [each.token_ids for each in llm.generate(PROMPTS[:4], params)]
        weight_cache.finish()
        return found

    monkeypatch.setenv(CACHE_VARIABLE, "0")
    expected = tokens()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    assert tokens() == expected
    assert len([each for each in tmp_path.iterdir() if each.is_dir()]) == 1, "nothing was kept"
    mapped = 0
    restored = weight_cache.restored

    def counted(*given: Any) -> bool:
        nonlocal mapped
        mapped += (done := restored(*given))
        return done

    monkeypatch.setattr(weight_cache, "restored", counted)
    assert tokens() == expected
    assert mapped == 1
