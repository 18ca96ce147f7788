"""AsyncLLM: concurrent callers get what they would get alone; cancelling and closing leave nothing behind."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from sametoken.engine.async_llm import AsyncLLM
from sametoken.engine.llm import LLM
from sametoken.errors import RequestError, SametokenError
from sametoken.options.sampling import SamplingParams


def free_pages(llm: LLM) -> bool:
    blocks = llm.engine.scheduler.blocks
    blocks.check()
    return blocks.available == blocks.pages - 1


def params(seed: int) -> SamplingParams:
    return SamplingParams(temperature=0.8, seed=seed, max_tokens=12 + seed, ignore_eos=True)


def test_concurrent_callers_get_what_each_gets_alone(tiny_llm_dir: Path) -> None:
    alone = LLM(str(tiny_llm_dir))
    prompts = [[3 + i, 4, 5] for i in range(6)]
    expected = [alone.generate([p], params(i))[0].token_ids for i, p in enumerate(prompts)]

    async def run() -> list[list[int]]:
        engine = AsyncLLM(LLM(str(tiny_llm_dir)))

        async def one(i: int) -> list[int]:
            await asyncio.sleep(0.002 * i)
            tokens: list[int] = []
            async for chunk in engine.stream([prompts[i]], params(i)):
                tokens += chunk.token_ids
            return tokens

        got = await asyncio.gather(*(one(i) for i in range(len(prompts))))
        assert [c.token_ids for c in await engine.generate(prompts, [params(i) for i in range(6)])] == expected
        await engine.close()
        assert free_pages(engine.llm)
        return list(got)

    assert asyncio.run(run()) == expected


@pytest.mark.parametrize(("elapsed", "chunks"), [(0.0, 2), (1.0, 12)])
def test_of_a_busy_engine_a_chunk_has_several_steps(
    tiny_llm_dir: Path, monkeypatch, elapsed: float, chunks: int
) -> None:
    """Where no time passes between steps, all that comes after the first token waits for the last; nothing is lost."""
    asked = SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True, logprobs=1)
    expected = LLM(str(tiny_llm_dir)).generate([[3, 4, 5]], asked)[0]
    now = itertools.count(step=elapsed)
    monkeypatch.setattr("sametoken.engine.async_llm.time.perf_counter", lambda: next(now))

    async def run() -> None:
        engine = AsyncLLM(LLM(str(tiny_llm_dir)), max_chunks_per_second=100)
        got = [chunk async for chunk in engine.stream([[3, 4, 5]], asked)]
        await engine.close()
        assert len(got) == chunks
        assert [token for chunk in got for token in chunk.token_ids] == expected.token_ids
        assert [item for chunk in got for item in chunk.logprobs or []] == expected.logprobs
        assert "".join(chunk.text for chunk in got) == expected.text

    asyncio.run(run())


def test_leaving_a_stream_frees_its_row(tiny_llm_dir: Path) -> None:
    async def run() -> None:
        engine = AsyncLLM(LLM(str(tiny_llm_dir)))
        stream = engine.stream([[5, 6, 7]], SamplingParams(max_tokens=60, ignore_eos=True))
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        await engine.generate([[1, 2]], SamplingParams(max_tokens=2))
        await engine.close()
        assert not engine.llm.engine.busy
        assert free_pages(engine.llm)

    asyncio.run(run())


def test_a_bad_request_raises_at_once_and_a_closed_engine_says_so(tiny_llm_dir: Path) -> None:
    async def run() -> None:
        engine = AsyncLLM(LLM(str(tiny_llm_dir)))
        with pytest.raises(RequestError, match="empty"):
            engine.stream([[]])
        await engine.close()
        with pytest.raises(SametokenError, match="stopped"):
            await engine.generate([[1, 2]])

    asyncio.run(run())
