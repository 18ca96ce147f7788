"""Drafters that join in one tree: every token stays, and each drafter is credited with its own guesses."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from adversaries import Adversary, adversaries, future
from engine_checks import DEPTH, alone, check_idle, inject, make_llm, prompts, said, save_pair, watch
from sametoken import LLM, SamplingParams
from sametoken.control.choice import DecodingRow, RequestedDraft
from sametoken.drafters.padded import Guess, chain
from sametoken.options.sampling import RequestSpeculation
from sametoken.speculation.structure import StructuredOutputs
from tiny_models import VOCAB

pytestmark = pytest.mark.usefixtures("one_thread")

FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grammar": {"structured_outputs": StructuredOutputs(regex="[a-f]{6,40}")},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.5},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return save_pair("llama-3.1", tmp_path_factory.mktemp("pair"))


def sampling(temperature: float, seed: int = 0, **options: Any) -> SamplingParams:
    settings = {"max_tokens": 24, "ignore_eos": True, "logprobs": 1, **options}
    return SamplingParams(temperature=temperature, seed=seed, **settings)


def joining(llm: LLM, seed: int = 0) -> None:
    """All drafters of a row, or some, joined or not, with any length."""
    luck = random.Random(seed)

    def choose(rows: Sequence[DecodingRow], beside: int = 0) -> list[RequestedDraft]:
        chosen = []
        for row in rows:
            limit = luck.choice([row.limit, luck.randint(0, row.limit)])
            methods = tuple(luck.sample(row.methods, luck.randint(1, len(row.methods)))) if limit else ()
            chosen.append(RequestedDraft(limit, methods, "" if limit else "gain", joined=luck.random() < 0.7))
        return chosen

    llm.engine.drafting.policy.choose = choose  # type: ignore[method-assign]


@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_no_token_depends_on_who_joins(pair: tuple[str, str], form: str, branches: int) -> None:
    """Greedy and sampled, in a batch, where pages run out and rows reach the end of the context."""
    options = {"cache": {"max_tokens": 160}, "max_seq_len": 64}
    oracle, llm = make_llm(pair[0], **options), make_llm(*pair, method="auto", tree_top_k=branches, **options)
    requests = [
        (prompt, sampling((0.0, 0.7, 1.0)[i % 3], i, max_tokens=60 if i % 2 else 20, **FORMS[form]))
        for i, prompt in enumerate(prompts(6))
    ]
    expected = [alone(oracle, *request) for request in requests]
    truths = [completion.prompt_token_ids + completion.token_ids for completion in expected]
    inject(llm, adversaries(truths, VOCAB, DEPTH, DEPTH * branches))
    plans = watch(llm)
    for seed in range(2):
        joining(llm, seed)
        got = llm.generate([prompt for prompt, _ in requests], [params for _, params in requests])
        assert [said(g) for g in got] == [said(e) for e in expected]
        assert sum(g.speculation.accepted for g in got) > 0
    assert form == "grammar" or sum(len(plan.preempted) for plan in plans) > 0
    assert any(item.joined and len(item.methods) > 2 for plan in plans for item in plan.decode)
    check_idle(llm.engine)


class Told:
    """Lessons of the policy, by method and for united methods."""

    def __init__(self, llm: LLM) -> None:
        self.drafts: dict[str, list[tuple[int, int, int]]] = {}
        llm.engine.drafting.policy.learn = self._learn  # type: ignore[method-assign]

    def _learn(self, methods: Sequence[str], requests: Sequence[int], *drafts: Sequence[int]) -> None:
        self.drafts.setdefault("+".join(methods), []).extend(zip(*drafts, strict=True))


def all_join(rows: Sequence[DecodingRow], beside: int = 0) -> list[RequestedDraft]:
    return [RequestedDraft(row.limit, row.methods, "" if row.limit else "end", joined=True) for row in rows]


def test_each_drafter_is_credited_with_its_own_guesses(pair: tuple[str, str]) -> None:
    """One is right for two tokens, one for a single one and then wrong, one never; the model is always right."""
    llm = make_llm(pair[0], pair[0], method="auto")
    texts = prompts(3)
    truths = [text + alone(llm, text, sampling(0.0)).token_ids for text in texts]

    def short(text: list[int], limit: int) -> Guess:
        return chain(future(truths, text, min(limit, 2)))

    def astray(text: list[int], limit: int) -> Guess:
        return chain([(token + bool(i)) % VOCAB for i, token in enumerate(future(truths, text, limit))])

    def never(text: list[int], limit: int) -> Guess:
        return chain([])

    del llm.engine.drafters["suffix"]
    inject(llm, {"suffix": Adversary(short, DEPTH), "astray": Adversary(astray, DEPTH), "never": Adversary(never, 1)})
    told = Told(llm)
    llm.engine.drafting.policy.choose = all_join  # type: ignore[method-assign]
    way = RequestSpeculation(steps=True)
    got = llm.generate(texts, replace(sampling(0.0), speculative=way))
    assert [g.prompt_token_ids + g.token_ids for g in got] == truths
    assert {(asked, made, right) for asked, made, right in told.drafts["never"]} == {
        (asked, 0, 0) for asked, *_ in told.drafts["never"]
    }
    for (asked, *model), (_, *copied), (_, *other) in zip(
        *(told.drafts[method] for method in ("draft_target", "suffix", "astray")), strict=True
    ):
        assert model == [asked, asked]
        assert copied == [min(2, asked)] * 2
        assert other == [asked, 1]
    assert told.drafts["astray+draft_target+never+suffix"] == told.drafts["draft_target"]
    for done in got:
        stats = done.speculation
        assert stats.accepted + stats.target_forwards == stats.emitted
        assert set(stats.drafted_by) <= {"draft_target", "suffix", "astray"}
        assert sum(stats.drafted_by.values()) == stats.drafts > 0
        for step in (step for step in done.steps or () if step.token_ids):
            longest = sum(step.accepted)
            assert step.drafter == ("draft_target" if longest > 2 else "suffix" if longest == 2 else "astray")
            names = {name for sayers in step.drafters for name in sayers}
            assert names == {"draft_target", "suffix", "astray"}
            first = step.drafters[step.parents.index(-1)]
            assert set(first) == names
            assert len(step.token_ids) == len(set(zip(step.parents, step.token_ids, strict=True)))


def test_rows_with_and_without_a_union_share_a_step(pair: tuple[str, str]) -> None:
    """The copy has a guess at every second place only, of other lengths in every row."""
    llm = make_llm(*pair, method="auto")
    texts = prompts(5)
    truths = [text + alone(llm, text, sampling(0.0)).token_ids for text in texts]
    llm.engine.drafters["suffix"] = Adversary(
        lambda text, limit: chain(future(truths, text, len(text) % (limit + 1))), DEPTH
    )
    llm.engine.drafting.policy.choose = all_join  # type: ignore[method-assign]
    got = llm.generate(texts, sampling(0.0))
    assert [g.prompt_token_ids + g.token_ids for g in got] == truths
    assert {name for g in got for name in g.speculation.drafted_by} >= {"suffix", "draft_target"}
