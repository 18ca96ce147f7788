"""Heads change no token: whatever EAGLE and Medusa guess, a request says what it says alone and plainly.

Token ids, text and log-probabilities are compared exactly; plain decoding of the request by itself is the oracle.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drafter_checks import check_draft
from engine_checks import alone, check_idle, llama, make_llm, prompts, said, save_pair, watch
from head_checks import llm_with, make_eagle, make_medusa
from sametoken import LLM, Completion, SamplingParams
from sametoken.drafters.base import Proposed
from sametoken.drafters.padded import padded
from sametoken.heads.eagle.module import EagleHead
from sametoken.heads.medusa.module import MedusaHeads

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = ("llama-3.1", "phi-3-long", "qwen-3-biases")
TREE = ((0,), (1,), (0, 0), (2,), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0), (0, 0, 0, 0))
HEADS: dict[str, dict[str, Any]] = {
    "eagle1": {"version": 1},
    "eagle3": {"layers": 2, "windows": (9, None), "norm_before_fc": True, "draft_vocab_size": 60},
    "eagle3.1": {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
    "medusa": {},
    "medusa tree": {"choices": TREE},
    "medusa of the target": {"choices": TREE, "own_heads": False},
}
REQUESTS = [
    (prompt, SamplingParams(temperature=(0.0, 0.8)[i % 2], seed=i, max_tokens=12, ignore_eos=True, logprobs=2))
    for i, prompt in enumerate(prompts(5))
]


def head_of(name: str, target: str, dtype: torch.dtype = torch.float32) -> EagleHead | MedusaHeads:
    make = make_medusa if name.startswith("medusa") else make_eagle
    return make(target, dtype=dtype, **HEADS[name])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_pair("llama-3.1", tmp_path_factory.mktemp("pair"))[0]


@pytest.fixture(scope="module")
def expected(target: str) -> list[Completion]:
    llm = make_llm(target, cache={"enable_block_reuse": False})
    return [alone(llm, *request) for request in REQUESTS]


def check(llm: LLM, expected: list[Completion]) -> None:
    """The requests together say what they say alone, and drafts were made."""
    got = llm.generate([prompt for prompt, _ in REQUESTS], [params for _, params in REQUESTS])
    assert [said(g) for g in got] == [said(e) for e in expected]
    assert all(g.speculation.drafted_by.get(llm.method, 0) > 0 for g in got)
    check_idle(llm.engine)


@pytest.mark.cover
@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("name", HEADS)
def test_every_kind_of_head(target: str, expected: list[Completion], name: str, branches: int) -> None:
    check(llm_with(target, head_of(name, target), tree_top_k=branches), expected)


@pytest.mark.cover
@pytest.mark.parametrize("name", ["eagle1", "eagle3", "medusa tree"])
@pytest.mark.parametrize("family", FAMILIES[1:])
def test_other_families(family: str, name: str, tmp_path: Path) -> None:
    target, _ = save_pair(family, tmp_path)
    plain = make_llm(target, cache={"enable_block_reuse": False})
    check(llm_with(target, head_of(name, target)), [alone(plain, *request) for request in REQUESTS])


SETTINGS: dict[str, dict[str, Any]] = {
    "pieces": {"max_num_tokens": 16, "max_mixed_prefill_tokens": 3},
    "preempted": {"max_seq_len": 64, "cache": {"max_tokens": 96}},
    "adaptive": {"adaptive": True},
    "auto": {"method": "auto"},
}


@pytest.mark.cover
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", ["eagle1", "eagle3", "medusa tree"])
def test_settings(target: str, expected: list[Completion], name: str, setting: str) -> None:
    llm = llm_with(target, head_of(name, target), tree_top_k=2, **SETTINGS[setting])
    plans = watch(llm)
    for _ in range(2):  # the second time with the pages of the first
        got = llm.generate([prompt for prompt, _ in REQUESTS], [params for _, params in REQUESTS])
        assert [said(g) for g in got] == [said(e) for e in expected]
    assert any(plan.preempted for plan in plans) == (setting == "preempted")
    check_idle(llm.engine)


PARAMETERS: dict[str, dict[str, Any]] = {
    "truncated": {"top_k": 2, "top_p": 0.9},
    "penalties": {"repetition_penalty": 1.7, "presence_penalty": 0.5, "frequency_penalty": 0.9},
    "bans": {"bad_words": ["a", "b c", "Q"], "logit_bias": {5: 4.0, 9: -100.0}, "min_tokens": 7,
             "stop_token_ids": [31, 44]},
}  # fmt: skip


@pytest.mark.cover
@pytest.mark.parametrize("parameters", PARAMETERS)
@pytest.mark.parametrize("name", ["eagle3", "medusa tree"])
def test_what_a_request_asks(target: str, name: str, parameters: str) -> None:
    """And every draft is well-formed, even where bans leave fewer guesses than there are branches."""
    llm = llm_with(target, head_of(name, target), tree_top_k=3, max_total_draft_tokens=9)
    drafter = llm.engine.drafters[llm.method]
    propose = drafter.propose

    def checked(rows: Any, pending: Any, limits: Any, sampling: Any) -> Proposed:
        proposed = propose(rows, pending, limits, sampling)
        check_draft(padded(pending, proposed.drafts), pending, limits, max(map(drafter.slots, limits)))
        return proposed

    drafter.propose = checked  # type: ignore[method-assign]
    common = {"seed": 5, "max_tokens": 12, "ignore_eos": True, **PARAMETERS[parameters]}
    requests = [(text, SamplingParams(temperature=t, **common)) for t in (0.0, 0.8) for text in prompts(2)]
    expected = [alone(llm, *request) for request in requests]
    got = llm.generate([text for text, _ in requests], [params for _, params in requests])
    assert [said(g) for g in got] == [said(e) for e in expected]


@pytest.mark.parametrize("name", ["eagle1", "eagle3", "medusa tree"])
def test_bfloat16(name: str, tmp_path: Path) -> None:
    """Half the digits and the same tokens, with the compiled kernels where there are any."""
    target = llama(tmp_path, hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    oracle = make_llm(target, dtype="bfloat16")
    expected = [alone(oracle, *request) for request in REQUESTS]
    check(llm_with(target, head_of(name, target, torch.bfloat16), dtype="bfloat16"), expected)


def test_medusa_reuses_pages_that_plain_requests_filled(target: str) -> None:
    llm = llm_with(target, head_of("medusa tree", target))
    text, params = REQUESTS[2]
    alone(llm, text, params)
    assert llm.generate(text, params)[0].cached_tokens == (len(text) - 1) // 8 * 8
