"""Memory of the KV cache on the CPU: a quarter of the machine at most, taken as it fills, given back when idle."""

from __future__ import annotations

import asyncio
import mmap
import sys
from pathlib import Path

import pytest
import torch

from sametoken.engine import async_llm, build
from sametoken.engine.async_llm import AsyncLLM
from sametoken.engine.llm import LLM
from sametoken.kernels.cpu.memory import clear, zeros
from sametoken.options.sampling import SamplingParams
from sametoken.runtime import memory

CPU = torch.device("cpu")
SIZE = 256 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_taken_as_it_is_written_and_given_back() -> None:
    before = resident_bytes()
    tensor = zeros((4, SIZE // 8), torch.bfloat16, CPU)
    assert resident_bytes() - before < SIZE // 8
    assert not tensor[1].any()
    tensor[2] = 1
    full = resident_bytes()
    assert full - before >= SIZE // 4
    clear(tensor)
    assert full - resident_bytes() >= SIZE // 4
    assert not tensor[2].any()


@pytest.mark.parametrize("method", [None, "ngram"])
def test_an_idle_engine_forgets_prefixes_and_answers_as_before(
    method: str | None, tiny_llm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_llm, "IDLE_S", 0.2)
    prompt, params = list(range(3, 90)), SamplingParams(temperature=0, max_tokens=20)

    async def run() -> None:
        engine = AsyncLLM(LLM(str(tiny_llm_dir), speculative={"method": method}))
        blocks, cache = engine.llm.engine.scheduler.blocks, engine.llm.engine.runner.cache
        first = await engine.generate([prompt], params)
        assert blocks.idle
        assert cache.keys.any()
        for _ in range(100):
            await asyncio.sleep(0.1)
            if not blocks.idle:
                break
        blocks.check()
        assert blocks.available == blocks.pages - 1
        assert [c.token_ids for c in await engine.generate([prompt], params)] == [c.token_ids for c in first]
        await engine.close()

    asyncio.run(run())


def test_a_cache_takes_a_quarter_of_the_machine_at_most(tiny_llm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tokens(**options: float) -> int:
        llm = LLM(str(tiny_llm_dir), max_batch_size=4096, max_seq_len=128, **options)
        return llm.engine.scheduler.blocks.pages * 32

    monkeypatch.setattr(build, "available_bytes", lambda device: 16 << 20)
    monkeypatch.setattr(memory, "available_bytes", lambda device: 16 << 20)
    monkeypatch.setattr(memory, "total_bytes", lambda: 16 << 20)
    quarter, asked = tokens(), tokens(kv_cache_free_memory_fraction=0.5)
    assert asked == pytest.approx(2 * quarter, rel=0.01)
    monkeypatch.setattr(memory, "total_bytes", lambda: 1 << 40)
    assert tokens() == pytest.approx(3.6 * quarter, rel=0.01)
