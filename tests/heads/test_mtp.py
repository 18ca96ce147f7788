"""Prediction blocks inside checkpoints: numbers of transformers' `MtpModel`, texts of plain decoding, refusals."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

import mtp_makers
from engine_checks import alone, check_idle, make_llm, prompts, said
from sametoken import LLM, SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

REQUESTS = [
    (prompt, SamplingParams(temperature=(0.0, 0.8)[i % 2], seed=i, max_tokens=12, ignore_eos=True, logprobs=2))
    for i, prompt in enumerate(prompts(5))
]


class Target(NamedTuple):
    """A target on disk, and its parts as transformers has them."""

    directory: str
    model: PreTrainedModel
    own: MtpModel


@pytest.fixture(scope="module", params=mtp_makers.FAMILIES)
def target(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Target:
    directory = tmp_path_factory.mktemp(request.param)
    return Target(str(directory), *mtp_makers.save_target(request.param, directory))


def noted(llm: LLM) -> list[tuple[list[int], list[int]]]:
    """Texts, and the chains that the block guesses after them from now on."""
    drafter: Any = llm.engine.drafters["mtp"]
    seen: list[tuple[list[int], list[int]]] = []
    propose = drafter.propose

    def spy(rows: Any, pending: Any, *others: Any) -> Any:
        found = propose(rows, pending, *others)
        for row, root, guess in zip(rows, pending, found.drafts, strict=True):
            seen.append(([*drafter._rows[row].text, root], list(guess.tokens)))
        return found

    drafter.propose = spy
    return seen


def test_guesses_are_those_of_transformers(target: Target) -> None:
    llm = make_llm(target.directory, method="mtp")
    seen = noted(llm)
    llm.generate([prompt for prompt, _ in REQUESTS], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    assert len(seen) > 10
    for text, chain in seen[::5]:
        logits = mtp_makers.chain_of(target.model, target.own, text, chain[:-1])
        assert [int(each.argmax()) for each in logits] == chain, text
    check_idle(llm.engine)


def test_texts_are_those_of_plain_decoding(target: Target) -> None:
    llm = make_llm(target.directory, method="mtp")
    expected = [alone(llm, *request) for request in REQUESTS]
    got = llm.generate([prompt for prompt, _ in REQUESTS], [params for _, params in REQUESTS])
    assert [said(g) for g in got] == [said(e) for e in expected]
    assert all(g.speculation.drafted_by.get("mtp", 0) > 0 for g in got)
    check_idle(llm.engine)
