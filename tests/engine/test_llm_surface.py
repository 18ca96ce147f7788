"""The surface of `LLM` that editors and notebooks meet: typed keywords, threads, context managers, repr, progress."""

from __future__ import annotations

import asyncio
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from threading import Barrier
from typing import Any, get_type_hints

import pytest
import torch

from cli_checks import Pair
from sametoken import LLM, AsyncLLM, ConfigError, EngineError, SamplingParams
from sametoken.options.declaration import declared, members
from sametoken.options.engine import EngineConfig, EngineOptions, KVCacheConfig
from sametoken.options.serving import CACHE

PARAMS = SamplingParams(max_tokens=4, temperature=0)


def test_the_typed_keywords_are_the_declared_options() -> None:
    options = {**declared(EngineConfig), **{CACHE + name: each for name, each in declared(KVCacheConfig).items()}}
    hints = get_type_hints(EngineOptions)
    assert hints.keys() == options.keys()
    for name, option in options.items():
        assert set(members(hints[name])) == set(members(option.hint)), name


def test_threads_are_set_and_checked(pair: Pair) -> None:
    before = torch.get_num_threads()
    try:
        with LLM(pair.target, threads=1):
            assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    with pytest.raises(ConfigError, match="threads is 0, expected 1 to 1024"):
        LLM(pair.target, threads=0)


@pytest.mark.parametrize("stated", [{"dtype": "int8"}, KVCacheConfig(dtype="int8")])
def test_a_setting_of_the_cache_that_is_given_twice_is_refused(pair: Pair, stated: Any) -> None:
    with pytest.raises(ConfigError, match="'dtype' of kv_cache and kv_cache_dtype are the same setting"):
        LLM(pair.target, kv_cache=stated, kv_cache_dtype="fp8")


def test_a_closed_llm_has_given_its_weights_back(pair: Pair) -> None:
    with LLM(pair.target, pair.draft) as llm:
        decoder = weakref.ref(llm.engine.runner.decoder)
        llm.generate("one two", PARAMS)
    assert decoder() is None
    assert repr(llm) == f"LLM({pair.target}, draft={pair.draft}, closed)"
    llm.close()
    with pytest.raises(EngineError, match="closed; make a new one"):
        llm.generate("one two", PARAMS)


def test_an_async_llm_is_closed_with_its_engine(pair: Pair) -> None:
    async def ask(llm: LLM) -> str:
        async with AsyncLLM(llm) as engine:
            (found,) = await engine.generate("one two", PARAMS)
        assert not engine.alive
        return found.text

    llm = LLM(pair.target)
    (plain,) = llm.generate("one two", PARAMS)
    assert asyncio.run(ask(llm)) == plain.text
    assert "closed" in repr(llm)


def test_reprs_can_be_read(pair: Pair) -> None:
    with LLM(pair.target, pair.draft, max_batch_size=2, max_seq_len=64) as llm:
        assert repr(llm) == (
            f"LLM({pair.target}, draft={pair.draft}, method=auto, float32 on cpu, max_batch_size=2, max_seq_len=64)"
        )
        (found,) = llm.generate("one two", PARAMS)
    assert repr(found).startswith(f"Completion({found.text!r}, 4 tokens in ")
    assert "finish_reason='length', method='auto', acceptance_length=" in repr(found)
    assert len(repr(found)) < 200


def test_which_forwards_an_acceptance_length_counts(pair: Pair) -> None:
    asked = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    with LLM(pair.target, pair.target, {"max_draft_len": 3, "adaptive": False}) as llm:
        (found,) = llm.generate("one two", asked)
    said = found.speculation.to_json()
    # The prompt's forward gives one token, and drafts of the target itself are right: three forwards for eleven tokens.
    assert sum(said["accepted_lengths"]) == said["target_forwards"] == 1 + 3
    assert said["acceptance_length"] == 12 / said["target_forwards"]
    drafts = sum(said["drafted_by"].values())
    assert said["tokens_per_draft"] == 1 + said["accepted"] / drafts > said["acceptance_length"]
    with LLM(pair.target, speculative={"method": "none"}) as llm:
        (plain,) = llm.generate("one two", asked)
    assert (plain.speculation.acceptance_length, plain.speculation.tokens_per_draft) == (1, 0)


@pytest.mark.parametrize("keyword", ["progress", "use_tqdm"])
def test_progress_counts_completions_on_a_terminal(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], keyword: str
) -> None:
    asked: dict[str, Any] = {keyword: True}
    with LLM(pair.target) as llm:
        plain = llm.generate(["a", "b"], PARAMS, **asked)
        assert capsys.readouterr().err == "", "nothing without a terminal"
        monkeypatch.setattr("sys.stderr.isatty", lambda: True)
        monkeypatch.setenv("FORCE_COLOR", "1")
        shown = llm.generate(["a", "b"], PARAMS, **asked)
    assert [each.token_ids for each in shown] == [each.token_ids for each in plain]
    assert "2/2" in capsys.readouterr().err


def test_a_stream_that_outlives_its_llm_ends_with_an_error(pair: Pair) -> None:
    llm = LLM(pair.target)
    stream, left = llm.stream("one", PARAMS), llm.stream("two", PARAMS)
    next(stream), next(left)
    llm.close()
    with pytest.raises(EngineError, match="was closed"):
        next(stream)
    left.close()  # silently


def test_threads_may_call_one_llm_together(pair: Pair) -> None:
    llm = LLM(pair.target, pair.draft, {"adaptive": False})
    prompts = [f"{number} and" for number in range(6)]
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=3)
    expected = [llm.generate(prompt, params)[0].token_ids for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        found = list(pool.map(lambda prompt: llm.generate(prompt, params)[0].token_ids, prompts * 2))
    assert found == expected * 2


def test_no_thread_keeps_the_others_out(pair: Pair) -> None:
    """A thread that steps the engine in a loop lets those in that wait, so that all requests run in one batch."""
    llm, people, turns = LLM(pair.target), 4, list[int]()
    start = Barrier(people)

    def work(number: int) -> None:
        start.wait()
        for _ in range(50):
            with llm._in_turn():
                time.sleep(1e-4)
                turns.append(number)

    with ThreadPoolExecutor(people) as pool:
        list(pool.map(work, range(people)))
    kept = sum(a == b for a, b in pairwise(turns))
    assert kept < len(turns) / 2
