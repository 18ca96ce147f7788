"""What a model is too small for is refused when it is asked, before it can hurt another caller's request."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sametoken import LLM, AsyncLLM, ConfigError, RequestError, SametokenError, SamplingParams, SpeculativeConfig


@pytest.fixture(scope="module")
def llm(tiny_llm_dir: Path) -> LLM:
    return LLM(str(tiny_llm_dir))


@pytest.mark.parametrize(
    ("params", "name"),
    [
        (SamplingParams(logprobs=5000), "logprobs is 5000"),
        (SamplingParams(prompt_logprobs=10**23), "prompt_logprobs is"),
        (SamplingParams(min_tokens=2**63, max_tokens=2**63), "min_tokens is"),
        (SamplingParams(n=100_000_000), "n is"),
    ],
)
def test_sizes_beyond_the_model_are_named(llm: LLM, params: SamplingParams, name: str) -> None:
    with pytest.raises(RequestError, match=name):
        llm.generate([[3, 4]], params)
    assert not llm.engine.busy


def test_text_that_is_not_unicode_is_a_request_error(llm: LLM) -> None:
    for refused in (lambda: llm.generate("a\ud800"), lambda: llm.generate("a", SamplingParams(bad_words=["\ud800"]))):
        with pytest.raises(RequestError, match="not Unicode"):
            refused()


def test_infinite_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_spec_factor"):
        SpeculativeConfig(suffix_decoding_max_spec_factor=float("inf"))


def test_closing_leaves_no_request_behind(tiny_llm_dir: Path) -> None:
    async def run() -> LLM:
        engine = AsyncLLM(LLM(str(tiny_llm_dir)))
        endless = SamplingParams(max_tokens=None, ignore_eos=True)
        tasks = [asyncio.create_task(engine.generate([[3 + i, 4]], endless)) for i in range(3)]
        await asyncio.sleep(0.05)
        await engine.close()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(ended, SametokenError | list)
        return engine.llm

    engine = asyncio.run(run()).engine
    assert not engine.busy
    engine.scheduler.blocks.check()
    assert engine.scheduler.blocks.available == engine.scheduler.blocks.pages - 1
