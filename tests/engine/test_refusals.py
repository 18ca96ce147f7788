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
        (SamplingParams(logprobs=5000), "logprobs: got 5000"),
        (SamplingParams(prompt_logprobs=10**23), "prompt_logprobs: got"),
        (SamplingParams(min_tokens=2**63, max_tokens=2**63), "min_tokens: got"),
        (SamplingParams(n=100_000_000), "n: got"),
    ],
)
def test_sizes_beyond_the_model_are_named(llm: LLM, params: SamplingParams, name: str) -> None:
    with pytest.raises(RequestError, match=name):
        llm.generate([[3, 4]], params)
    assert not llm.engine.busy


WRONG = [5, None, 5.0, b"text", {"prompt": "text"}, {1, 2}, [None], [5.5], [[5], None], [b"x"], [[]]]


@pytest.mark.parametrize("prompt", WRONG, ids=str)
@pytest.mark.parametrize("call", ["generate", "stream", "chat"])
def test_prompts_of_another_type_are_named(llm: LLM, call: str, prompt: object) -> None:
    with pytest.raises(RequestError, match=r"expected|empty") as caught:
        list(getattr(llm, call)(prompt))
    assert len(str(caught.value)) < 300
    assert not llm.engine.busy


@pytest.mark.parametrize("params", [5, "hot", {"max_tokens": 3}, [5], [{"max_tokens": 3}], [None], b"x"])
def test_parameters_of_another_type_are_named(llm: LLM, params: object) -> None:
    with pytest.raises(RequestError, match="expected SamplingParams"):
        llm.generate("a", params)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [{"speculative": 5}, {"kv_cache": "large"}, {"draft": 5}, {"dtype": 5}, {"max_batch_size": "many"},
     {"tokenizer": 5},
     {"draft": [""]}, {"nonsense": 1}],
    ids=str,
)  # fmt: skip
def test_settings_of_another_type_are_named(options: dict[str, object], tiny_llm_dir: Path) -> None:
    with pytest.raises(SametokenError, match=r"expected|unknown|should be"):
        LLM(str(tiny_llm_dir), **options)  # type: ignore[arg-type]


def test_async_callers_too(llm: LLM) -> None:
    async def run() -> None:
        engine = AsyncLLM(llm)
        for wrong in (5, None, [None]):
            with pytest.raises(RequestError):
                await engine.generate(wrong)  # type: ignore[arg-type]
        with pytest.raises(RequestError):
            await engine.chat(5)  # type: ignore[arg-type]
        await engine.close()

    asyncio.run(run())


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
