"""Guesses beside a chain: where verification is cheap they bring tokens, where it is dear nobody makes them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine_checks import check_idle, said
from sametoken import LLM, SamplingParams
from sametoken.control.cost import Costs, Measured
from sametoken.engine.stats import SpeculationStats
from sametoken.kernels.cpu.variant import library
from sametoken.options.sampling import RequestSpeculation

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(library() is None, reason="only the compiled kernels know what stands second"),
]
ADAPTIVE = RequestSpeculation(adaptive=True)


class Fixed(Costs):
    """Costs that are as given, whatever is seen."""

    def saw_step(self, nodes: int, rows: int, context: float, seconds: float, times: int = 1) -> None:
        return

    def saw_draft(self, method: str, rows: int, levels: int, seconds: float) -> None:
        return


def model_of(llm: LLM) -> str:
    """The method that guesses with a model."""
    return next(method for method in llm.methods if llm.engine.drafting.runs_model(method))


def priced(draft: str, node: float) -> LLM:
    """An engine whose forwards take a second, and `node` more for each token after the first one."""
    llm = LLM("embedded", draft, {"max_draft_len": 6}, max_batch_size=4, max_seq_len=192)
    step, little = {1: 1.0, 2: 1.0 + node, 256: 1.0 + 255 * node}, {1: 1e-4}
    model = model_of(llm)
    llm.engine.drafting.policy.costs = Fixed(Measured(step, 0.0, 0.0, {model: little}, {model: little}, {model: 1e-5}))
    return llm


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM("embedded", max_batch_size=4, max_seq_len=192)


def run(llm: LLM, plain: LLM, temperature: float, rows: int) -> SpeculationStats:
    """What speculation did for some texts, which are those of plain decoding."""
    questions = ["Hello!", "A large latte, please.", "I need a taxi.", "How much is a ticket to Boston?"][:rows]
    texts = [plain.render_chat([{"role": "user", "content": each}]) for each in questions]
    kinds: list[dict[str, Any]] = [
        {},
        {"top_p": 0.9},
        {"top_k": 20},
        {"frequency_penalty": 0.3},
    ]  # the last is guessed by torch, in chains
    params = [
        SamplingParams(temperature=temperature, seed=row, max_tokens=40, ignore_eos=True, logprobs=1, **kind)
        for row, kind in enumerate(kinds[:rows])
    ]
    done = llm.generate(texts, [replace(each, speculative=ADAPTIVE) for each in params])
    assert [said(each) for each in done] == [said(each) for each in plain.generate(texts, params)]
    return SpeculationStats.total(each.speculation for each in done)


def beside(stats: SpeculationStats) -> int:
    """Guesses that are not on the longest path of their draft."""
    return stats.drafted - sum(length * count for length, count in enumerate(stats.drafted_lengths))


@pytest.mark.parametrize("draft", ["embedded", "embedded-eagle3"])
def test_siblings_bring_tokens_where_verification_is_cheap(plain: LLM, draft: str) -> None:
    llm = priced(draft, node=1e-3)
    run(llm, plain, 1.0, 3)  # learns
    stats = [run(llm, plain, temperature, rows) for temperature in (1.0, 0.0) for rows in (1, 3)]
    assert all(beside(each) > 0 for each in stats)
    run(llm, plain, 1.0, 4)
    for each in (
        stats[:2] + stats[3:5]
    ):  # of all guesses that were verified, siblings too, it is known what was expected
        seen = next(iter(each.reliability.values()))
        assert sum(seen.accepted) == pytest.approx(each.accepted, abs=24)
        assert sum(seen.tried) > sum(each.tried)
    check_idle(llm.engine)


def test_siblings_vanish_where_verification_is_dear(plain: LLM) -> None:
    llm = priced("embedded", node=0.6)
    run(llm, plain, 1.0, 3)
    assert [beside(run(llm, plain, temperature, 3)) for temperature in (1.0, 0.0)] == [0, 0]


def test_siblings_take_only_slots_that_are_left(plain: LLM) -> None:
    """A step of few tokens and a request near its end have room for chains alone."""
    llm = priced("embedded", node=1e-3)
    llm.engine.scheduler.max_num_tokens = 24
    run(llm, plain, 1.0, 3)
    run(llm, plain, 0.0, 4)
    check_idle(llm.engine)
