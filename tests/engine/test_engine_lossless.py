"""Losslessness as an equality: whatever drafts and whoever shares the batch, a request says what it says alone.

Token ids, text and log-probabilities are compared exactly; plain decoding of the request by itself is the oracle.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adversaries import adversaries
from engine_checks import (
    DEPTH,
    PAGE,
    alone,
    check_idle,
    inject,
    llama,
    make_llm,
    prompts,
    said,
    save_pair,
    using,
    watch,
)
from head_checks import llm_with, make_eagle
from sametoken import LLM, SamplingParams
from sametoken.kernels.cpu.variant import library
from tiny_models import VOCAB

FAMILIES = ("llama-3.1", "mistral", "phi-3-long", "qwen-2", "qwen-3-biases", "gpt-oss", "qwen-2-moe")
TEMPERATURES = (0.0, 0.7, 1.0)
NODES = 12
TOKENS = 20


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A Llama target and a draft that is often right."""
    return save_pair("llama-3.1", tmp_path_factory.mktemp("pair"))


def sampling(temperature: float, seed: int = 11, **options: object) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=seed, max_tokens=TOKENS, ignore_eos=True, **options)  # type: ignore[arg-type]


REQUESTS = [(prompt, sampling(TEMPERATURES[i % 3], seed=i, logprobs=2)) for i, prompt in enumerate(prompts(6))]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return save_pair(request.param, tmp_path_factory.mktemp(request.param))


def test_every_drafter_of_every_family(family: tuple[str, str]) -> None:
    oracle = make_llm(*family, cache={"enable_block_reuse": False})
    expected = [alone(oracle, *request) for request in REQUESTS]
    truths = [completion.prompt_token_ids + completion.token_ids for completion in expected]
    accepted: dict[str, int] = {}
    for branches in (1, 2, 3):
        llm = make_llm(*family, tree_top_k=branches, max_total_draft_tokens=NODES if branches == 3 else None)
        if branches == 3:
            inject(llm, adversaries(truths, VOCAB, DEPTH, NODES))
        methods = llm.methods if branches == 3 else ["draft_target"]
        for method in methods:
            got = llm.generate([p for p, _ in REQUESTS], [using(params, method) for _, params in REQUESTS])
            assert [said(g) for g in got] == [said(e) for e in expected], (method, branches)
            accepted[f"{method}{branches}"] = sum(g.speculation.accepted for g in got)
        check_idle(llm.engine)
    # A draft that is never right proves nothing.
    assert all(accepted[name] > 0 for name in ("draft_target1", "draft_target2", "draft_target3", "right3", "bush3"))
    assert accepted["wrong_at_03"] == 0
    assert 0 < accepted["wrong_at_13"] < accepted["right3"]


PARAMETERS = {
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.2},
    "penalties": {"repetition_penalty": 1.7, "presence_penalty": 0.5, "frequency_penalty": 0.9},
    "negative penalty": {"frequency_penalty": -1.5},
    "bias": {"logit_bias": {5: 4.0, 9: -100.0, 70: 2.5}},
    "bad words": {"bad_words": ["a", "b c", "e", "Q"]},
    "everything": {
        "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2, "logit_bias": {8: 1.0}, "bad_words": ["k"],
        "min_tokens": 7, "stop_token_ids": [31, 44], "logprobs": 3,
    },
    "min tokens": {"min_tokens": 9, "stop_token_ids": list(range(10, 60))},
    "stop ids": {"stop_token_ids": list(range(20, 40))},
    "stop strings": {"stop": ["a", "Zb", "7"], "include_stop_str_in_output": True},
    "end of text": {"ignore_eos": False, "logit_bias": {2: 5.0}},
}  # fmt: skip


@pytest.fixture(scope="module")
def trees(pair: tuple[str, str]) -> LLM:
    return make_llm(*pair, tree_top_k=2, max_total_draft_tokens=NODES)


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_parameter_together_with_drafts(trees: LLM, name: str) -> None:
    requests = [
        (prompt, SamplingParams(**{"temperature": t, "seed": i, "max_tokens": TOKENS, "logprobs": 1, "ignore_eos": True}
                                | PARAMETERS[name]))
        for t in TEMPERATURES for i, prompt in enumerate(prompts(2))
    ]  # fmt: skip
    expected = [alone(trees, *request) for request in requests]
    truths = [completion.prompt_token_ids + completion.token_ids for completion in expected]
    inject(trees, adversaries(truths, VOCAB, DEPTH, NODES))
    for method in ("draft_target", "right", "bush"):
        got = trees.generate([p for p, _ in requests], [using(params, method) for _, params in requests])
        assert [said(g) for g in got] == [said(e) for e in expected], method
    check_idle(trees.engine)


def test_choices_have_their_own_seeds(trees: LLM) -> None:
    params = sampling(1.0, n=3)
    plain = trees.generate(prompts(2)[1], using(params, "none"))
    got = trees.generate(prompts(2)[1], params)
    assert [said(g) for g in got] == [said(p) for p in plain]
    assert len({tuple(g.token_ids) for g in got}) == 3
    assert said(plain[0]) == said(alone(trees, prompts(2)[1], sampling(1.0)))


@pytest.mark.parametrize("draft", ["none", "draft_target", "eagle3", "resting", "preempted"])
def test_choices_share_the_pages_of_their_prompt_while_they_run(
    pair: tuple[str, str], draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens as without sharing, from fewer pages, and the prompt is read once, by the draft too."""
    prompt, params = [*range(3, 3 + 5 * PAGE + 2)], sampling(1.0, n=4, logprobs=1)
    seen = {}
    for reuse in (False, True):
        cache = {"enable_block_reuse": reuse, "max_tokens": (14 if draft == "preempted" else 100) * PAGE}
        if draft in ("eagle3", "resting"):
            llm = llm_with(pair[0], make_eagle(pair[0]), cache=cache)
            if draft == "resting":  # what may draft next need not be read along, unless others wait for it
                monkeypatch.setattr(llm.engine.drafting.policy, "expects", lambda method: False)
        else:
            llm = make_llm(*pair, cache=cache)
        method = {"preempted": "draft_target", "resting": "eagle3"}.get(draft, draft)
        requests = llm.make_requests(prompt, using(params, method))
        for request in requests:
            llm.engine.add(request)
        read = most = preempted = drafts = 0
        while llm.engine.busy:
            plan = llm.engine.step().plan
            drafts += sum(each.draft_cached for each in plan.admitted)
            read += sum(len(piece.tokens) for piece in plan.prefill)
            most, preempted = max(most, llm.engine.load.pages_used), preempted + len(plan.preempted)
        check_idle(llm.engine)
        seen[reuse] = [(request.output_ids, request.logprobs) for request in requests], read, most, preempted, drafts
    (apart, all_read, pages, *_), (together, read, fewer, preempted, drafts) = seen[False], seen[True]
    assert together == apart
    assert len(set(map(str, together))) == 4
    if draft == "preempted":
        assert preempted
        assert read < all_read
    else:
        assert all_read == 4 * len(prompt)
        assert read == len(prompt) + 3 * 2
        assert fewer <= pages - 3 * 5
        assert drafts == 3 * 5 * PAGE


def test_a_mixed_batch_whose_requests_arrive_one_by_one(trees: LLM) -> None:
    expected = [alone(trees, *request) for request in REQUESTS]
    truths = [completion.prompt_token_ids + completion.token_ids for completion in expected]
    inject(trees, adversaries(truths, VOCAB, DEPTH, NODES))
    methods = ("draft_target", "bush", "none", "right", "ngram", "suffix")
    arriving = [
        trees.make_requests(prompt, using(params, method))[0]
        for (prompt, params), method in zip(REQUESTS, methods, strict=True)
    ]
    for request in arriving:
        trees.engine.add(request)
        trees.engine.step()
        trees.engine.step()
    while trees.engine.busy:
        trees.engine.step()
    assert [r.output_ids for r in arriving] == [e.token_ids for e in expected]
    assert [r.logprobs for r in arriving] == [e.logprobs for e in expected]


@pytest.mark.parametrize("method", ["draft_target", "bush", "suffix"])
def test_preempted_requests(pair: tuple[str, str], method: str) -> None:
    llm = make_llm(*pair, tree_top_k=2, max_seq_len=72, cache={"max_tokens": 120})
    expected = [alone(llm, *request) for request in REQUESTS]
    truths = [completion.prompt_token_ids + completion.token_ids for completion in expected]
    inject(llm, adversaries(truths, VOCAB, DEPTH, 8))
    plans = watch(llm)
    got = llm.generate([p for p, _ in REQUESTS], [using(params, method) for _, params in REQUESTS])
    assert llm.engine.load.preemptions == sum(len(plan.preempted) for plan in plans) > 0
    assert [said(g) for g in got] == [said(e) for e in expected]
    check_idle(llm.engine)


@pytest.mark.parametrize("sizes", [(2, 1), (16, 3), (24, 64)])
def test_prompts_in_pieces(pair: tuple[str, str], sizes: tuple[int, int]) -> None:
    whole = make_llm(*pair)
    expected = [alone(whole, *request) for request in REQUESTS]
    llm = make_llm(*pair, max_num_tokens=sizes[0], max_mixed_prefill_tokens=sizes[1])
    got = llm.generate([p for p, _ in REQUESTS], [params for _, params in REQUESTS])
    assert [said(g) for g in got] == [said(e) for e in expected]


@pytest.mark.parametrize("method", ["draft_target", "ngram", "none"])
def test_reused_prefixes(pair: tuple[str, str], method: str) -> None:
    llm = make_llm(*pair, tree_top_k=2)
    start = prompts(3)[2]
    texts = [start, [*start[:30], 9, 9], start + [4] * 6]
    expected = [alone(make_llm(*pair, cache={"enable_block_reuse": False}), text, sampling(0.7)) for text in texts]
    for _ in range(2):
        got = [llm.generate(text, using(sampling(0.7), method))[0] for text in texts]
        assert [said(g) for g in got] == [said(e) for e in expected]
    assert [g.cached_tokens for g in got] == [(len(text) - 1) // PAGE * PAGE for text in texts]
    check_idle(llm.engine)


@pytest.mark.cover
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("setting", ["alone", "batch", "preempted", "reused", "pieces"])
def test_a_draft_equal_to_the_target_is_always_right(pair: tuple[str, str], temperature: float, setting: str) -> None:
    """Then its cache holds what the target's holds: backlog, chains, preemption, shared pages."""
    options: dict[str, Any] = {}
    if setting == "pieces":
        options = {"max_num_tokens": 24, "max_mixed_prefill_tokens": 5}
    if setting == "preempted":
        options = {"max_seq_len": 72, "cache": {"max_tokens": 120}}
    llm = make_llm(pair[0], pair[0], **options)
    params = sampling(temperature)
    plans = watch(llm)
    if setting == "reused":
        # The first ends with its first token: its pages must hold the draft's keys and values all the same.
        llm.generate(prompts(3)[2], SamplingParams(max_tokens=1))
        again = llm.generate(prompts(3)[2], replace(params, max_tokens=36))
        assert again[0].cached_tokens > 0
        got = again + llm.generate(again[0].prompt_token_ids + again[0].token_ids, params)
        assert got[1].cached_tokens > len(got[0].prompt_token_ids)
    else:
        got = llm.generate(prompts(6) if setting != "alone" else prompts(3)[2], params)
    assert sum(g.speculation.accepted for g in got) > 0
    assert all(g.speculation.accepted == g.speculation.drafted for g in got)
    assert any(plan.preempted for plan in plans) == (setting == "preempted")


def test_a_greedy_tree_contains_what_an_equal_draft_knows(pair: tuple[str, str]) -> None:
    """Every level of an equal draft's tree holds the target's token, until the budget or the request ends."""
    llm = make_llm(pair[0], pair[0], tree_top_k=2)
    got = llm.generate(prompts(3), sampling(0.0))
    for completion in got:
        short = [n for n, count in enumerate(completion.speculation.accepted_lengths) if count and n < DEPTH]
        assert sum(completion.speculation.accepted_lengths[n] for n in short) <= 2  # the prompt's draw and the end


SHAPES = {
    "grouped": {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
    "multi-head": {"hidden_size": 192, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 64},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16(shape: str, tmp_path: Path) -> None:
    """Half the digits and the same tokens: plain alone, speculative in a batch, prompts in pieces."""
    target = llama(tmp_path / "target", **SHAPES[shape])
    draft = llama(tmp_path / "draft", **SHAPES[shape], num_hidden_layers=2)
    oracle = make_llm(target, dtype="bfloat16")
    expected = [alone(oracle, *request) for request in REQUESTS]
    truths = [completion.prompt_token_ids + completion.token_ids for completion in expected]
    for branches, pieces in ((1, 512), (3, 16)):
        llm = make_llm(target, draft, dtype="bfloat16", tree_top_k=branches, max_num_tokens=pieces)
        inject(llm, adversaries(truths, VOCAB, DEPTH, DEPTH * branches))
        for method in ("draft_target", "right", "bush"):
            got = llm.generate([p for p, _ in REQUESTS], [using(params, method) for _, params in REQUESTS])
            assert [said(g) for g in got] == [said(e) for e in expected], (branches, method)


@pytest.mark.cover
@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("family", ["mixtral", "gpt-oss", "qwen-2-moe", "glm-4.5-moe", "deepseek-v3", "llama-4"])
def test_experts_in_bfloat16(family: str, quantization: str, tmp_path: Path) -> None:
    """In the compiled call, where kernels are: trees of several rows share experts, a request alone does not.

    Latent attention has no compiled form.
    """
    target, draft = save_pair(family, tmp_path)
    options: dict[str, Any] = {"dtype": "bfloat16", "quantization": quantization}
    oracle = make_llm(target, **options)
    expected = [alone(oracle, *request) for request in REQUESTS]
    truths = [completion.prompt_token_ids + completion.token_ids for completion in expected]
    llm = make_llm(target, draft, tree_top_k=3, max_total_draft_tokens=NODES, **options)
    decoder = llm.engine.runner.decoder
    assert (decoder.native is None) == (library() is None or decoder.config.latent is not None)
    inject(llm, adversaries(truths, VOCAB, DEPTH, NODES))
    accepted = {}
    for method in ("draft_target", "right", "bush"):
        got = llm.generate([p for p, _ in REQUESTS], [using(params, method) for _, params in REQUESTS])
        assert [said(g) for g in got] == [said(e) for e in expected], method
        accepted[method] = sum(g.speculation.accepted for g in got)
    assert all(accepted.values()), accepted
    check_idle(llm.engine)


@pytest.mark.cover
@pytest.mark.parametrize("branches", [1, 2])
@pytest.mark.parametrize("budget", [1, DEPTH - 1])
def test_a_budget_below_the_length_bounds_every_draft(pair: tuple[str, str], branches: int, budget: int) -> None:
    head = make_eagle(pair[0])
    for llm in (
        make_llm(*pair, tree_top_k=branches, max_total_draft_tokens=budget),
        llm_with(pair[0], head, tree_top_k=branches, max_total_draft_tokens=budget),
    ):
        expected = [alone(llm, *request) for request in REQUESTS]
        for method in llm.methods:
            got = llm.generate([p for p, _ in REQUESTS], [using(params, method) for _, params in REQUESTS])
            assert [said(g) for g in got] == [said(e) for e in expected], method
            assert max(len(g.speculation.drafted_lengths) for g in got) <= 1 + budget, method
