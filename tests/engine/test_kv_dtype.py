"""A cache of codes loses nothing beside plain decoding over the same codes, whatever drafts, batches or cuts prompts.

In bfloat16 compiled kernels compute where there are any, in float32 plain torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from adversaries import adversaries
from engine_checks import DEPTH, alone, check_idle, inject, make_llm, prompts, said, save_pair, using, watch
from head_checks import llm_with, make_eagle, make_medusa
from sametoken import LLM, Completion, SamplingParams
from sametoken.engine import build
from sametoken.errors import ConfigError
from tiny_models import VOCAB

pytestmark = pytest.mark.usefixtures("one_thread")

NODES = 12
TREE = ((0,), (1,), (0, 0), (2,), (0, 1), (1, 0), (0, 0, 0))
REQUESTS = [
    (prompt, SamplingParams(temperature=(0.0, 0.8, 1.0)[i % 3], seed=i, max_tokens=16, ignore_eos=True, logprobs=1))
    for i, prompt in enumerate(prompts(5))
]


class Case(NamedTuple):
    """A target and a draft on disk, how their engines compute and store, and what plain decoding says."""

    target: str
    draft: str
    dtype: str
    kv_dtype: str
    expected: list[Completion]

    def options(self, **more: Any) -> dict[str, Any]:
        cache = {"dtype": self.kv_dtype, **more.pop("cache", {})}
        return {"dtype": self.dtype, "cache": cache, **more}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return save_pair("llama-3.1", tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def latent_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return save_pair("deepseek-v3", tmp_path_factory.mktemp("latent"))


CASES = [
    "float32 int8", "bfloat16 int8", "bfloat16 fp8", "float32 bfloat16", "latent float32 int8", "latent bfloat16 fp8"
]  # fmt: skip


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    *latent, dtype, kv_dtype = request.param.split()
    pair = request.getfixturevalue("latent_pair" if latent else "pair")
    plain = make_llm(pair[0], dtype=dtype, cache={"dtype": kv_dtype, "enable_block_reuse": False})
    return Case(*pair, dtype, kv_dtype, [alone(plain, *each) for each in REQUESTS])


def check(llm: LLM, case: Case, method: str | None = None) -> int:
    """The requests together say what they say alone; how many draft tokens were accepted."""
    asked = [params if method is None else using(params, method) for _, params in REQUESTS]
    got = llm.generate([prompt for prompt, _ in REQUESTS], asked)
    assert [said(g) for g in got] == [said(e) for e in case.expected], method
    check_idle(llm.engine)
    return sum(g.speculation.accepted for g in got)


def test_codes_are_not_numbers(case: Case) -> None:
    """Otherwise the rest proves nothing."""
    numbers = make_llm(case.target, dtype=case.dtype)
    assert [alone(numbers, *each).logprobs for each in REQUESTS] != [each.logprobs for each in case.expected]


@pytest.mark.cover
@pytest.mark.parametrize("branches", [1, 3])
def test_every_drafter(case: Case, branches: int) -> None:
    nodes = NODES if branches > 1 else None
    llm = make_llm(case.target, case.draft, tree_top_k=branches, max_total_draft_tokens=nodes, **case.options())
    truths = [each.prompt_token_ids + each.token_ids for each in case.expected]
    if branches > 1:
        inject(llm, adversaries(truths, VOCAB, DEPTH, NODES))
    accepted = {method: check(llm, case, method) for method in llm.methods}
    assert accepted["draft_target"] > 0
    if branches > 1:
        assert accepted["right"] > 0
        assert accepted["bush"] > 0


SETTINGS: dict[str, dict[str, Any]] = {
    "pieces": {"max_num_tokens": 16, "max_mixed_prefill_tokens": 3},
    "preempted": {"max_seq_len": 64, "cache": {"max_tokens": 96}},
    "pages of one": {"cache": {"tokens_per_block": 1}},
    "adaptive": {"adaptive": True},
}


@pytest.mark.cover
@pytest.mark.parametrize("setting", SETTINGS)
def test_settings(case: Case, setting: str) -> None:
    llm = make_llm(case.target, case.draft, tree_top_k=2, **case.options(**SETTINGS[setting]))
    plans = watch(llm)
    for _ in range(2):  # the second time with the pages of the first
        check(llm, case)
    assert any(plan.preempted for plan in plans) == (setting == "preempted")


@pytest.mark.cover
@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("name", ["eagle1", "eagle3", "medusa"])
def test_heads(case: Case, name: str, branches: int) -> None:
    dtype = getattr(torch, case.dtype)
    if name == "medusa":
        head: Any = make_medusa(case.target, dtype=dtype, choices=TREE)
    else:
        head = make_eagle(case.target, dtype=dtype, version=int(name[-1]))
    llm = llm_with(case.target, head, tree_top_k=branches, **case.options())
    check(llm, case)


def test_the_pool_holds_more_tokens(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the bytes of a token: 16 numbers of a head are 32 bytes in bfloat16, 20 as codes."""
    monkeypatch.setattr(build, "available_bytes", lambda device: 10 * 2**20)
    options = {"dtype": "bfloat16", "max_batch_size": 4096}
    pages = {}
    for dtype in ("auto", "int8", "fp8"):
        llm = LLM(*pair, kv_cache={"tokens_per_block": 8, "free_memory_fraction": 0.9}, kv_cache_dtype=dtype, **options)  # type: ignore[arg-type]
        pages[dtype] = llm.engine.runner.cache.table.pages
        cache = llm.engine.runner.cache
        assert cache.keys.shape[-1] == 16
    assert pages["int8"] == pages["fp8"]
    assert pages["int8"] / pages["auto"] == pytest.approx(32 / 20, rel=0.02)


def test_names(pair: tuple[str, str], tmp_path: Path) -> None:
    for name in ("q8_0", "int8_per_token_head"):
        assert make_llm(pair[0], kv_cache_dtype=name).engine.runner.cache.keys.dtype == torch.int8
    assert make_llm(pair[0], kv_cache_dtype="fp8_e5m2").engine.runner.cache.keys.dtype == torch.uint8
    with pytest.raises(ConfigError, match=r"E5M2 has one bit of fraction less .* use fp8"):
        make_llm(pair[0], cache={"dtype": "fp8_e5m2"})
    with pytest.raises(ConfigError, match="unknown LLM keyword 'kv_cache_type': did you mean 'kv_cache_dtype'"):
        make_llm(pair[0], kv_cache_type="int8")
