"""A predicted output is a draft: it changes no token, saves forwards where it is right, and is found again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drafter_checks import check_draft, drafted
from sametoken import LLM, Completion, RequestError, RequestSpeculation, SamplingParams
from sametoken.drafters.base import RowOrigin
from sametoken.drafters.prediction import PredictionDrafter, index_prediction
from sametoken.drafters.suffix import SuffixAutomaton
from sametoken.speculation.structure import StructuredOutputs

PROMPT = "one two one two"


@pytest.fixture(scope="module")
def llm(tiny_llm_dir: Path, one_thread: None) -> LLM:
    return LLM(str(tiny_llm_dir), speculative={"max_draft_len": 6, "adaptive": False})


def complete(llm: LLM, prediction: str | None, **params: object) -> Completion:
    speculative = RequestSpeculation(prediction=prediction)
    return llm.generate(PROMPT, SamplingParams(max_tokens=40, seed=3, speculative=speculative, **params))[0]  # type: ignore[arg-type]


def drafts(drafter: PredictionDrafter, known: SuffixAutomaton, prompt: list[int], output: list[int]) -> list[list[int]]:
    """What is guessed after each token of an output."""
    drafter.admit(0, [], origin=RowOrigin(prediction=known))
    drafter.observe([0], [prompt], None)
    found = []
    for token in output:
        draft = drafted(drafter, [0], [token], [4], None)
        check_draft(draft, [token], [4], drafter.nodes)
        found.append(draft.tokens[0, 1:].tolist())
        drafter.observe([0], [[token]], None)
    drafter.release(0)
    return found


def test_a_draft_continues_the_prediction_and_finds_it_again_after_an_edit() -> None:
    text = list(range(10, 30))
    edited = [10, 11, 12, 99, 98, 15, 16, 17]  # 13 and 14 became 99 and 98
    found = drafts(PredictionDrafter(4), index_prediction(text), [1, 2, 3], edited)
    assert found == [
        [11, 12, 13, 14], [12, 13, 14, 15], [13, 14, 15, 16], [], [], [16], [17, 18, 19, 20], [18, 19, 20, 21],
    ]  # fmt: skip


def test_an_output_that_begins_elsewhere_is_found_by_its_last_tokens() -> None:
    known = index_prediction(list(range(10, 30)))
    assert drafts(PredictionDrafter(4), known, [1, 2], [20, 21])[1] == [22, 23, 24, 25]
    # A preempted row reads its output again as if it were prompt.
    assert drafts(PredictionDrafter(4), known, [1, 2, 10, 11, 12], [13])[0] == [14, 15, 16, 17]


def test_rows_without_a_prediction_are_not_drafted() -> None:
    drafter = PredictionDrafter(4)
    drafter.admit(0, [1, 2])
    drafter.observe([0], [[3]], None)
    assert drafted(drafter, [0], [4], [4], None).tokens.tolist() == torch.tensor([[4]]).tolist()


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 0.8}, {"temperature": 1.0, "top_k": 20}])
def test_a_prediction_changes_no_token_and_saves_forwards_where_it_is_right(llm: LLM, params: dict[str, float]) -> None:
    plain = llm.generate(PROMPT, SamplingParams(max_tokens=40, seed=3, **params))[0]  # type: ignore[arg-type]
    # Ids beyond the tokenizer's have no text, so a right prediction is one of the text up to there.
    right = complete(llm, plain.text, **params)
    wrong = complete(llm, "something else entirely", **params)
    for got in (right, wrong):
        assert got.token_ids == plain.token_ids
        assert got.speculation.method == "prediction"
    assert right.speculation.acceptance_length > 1.5
    assert wrong.speculation.accepted <= 2
    assert right.speculation.target_forwards < wrong.speculation.target_forwards


def test_choices_share_a_prediction_and_a_batch_mixes_methods(llm: LLM) -> None:
    plain = llm.generate(PROMPT, SamplingParams(n=3, max_tokens=20, seed=5))
    ways = [RequestSpeculation(prediction=plain[0].text), RequestSpeculation(method="suffix"), None]
    for way in ways:
        got = llm.generate(PROMPT, SamplingParams(n=3, max_tokens=20, seed=5, speculative=way))
        assert [each.token_ids for each in got] == [each.token_ids for each in plain]
    params = [SamplingParams(max_tokens=20, seed=5, speculative=way) for way in ways]
    mixed = llm.generate([PROMPT] * 3, params)
    assert len({tuple(each.token_ids) for each in mixed}) == 1


def test_prompts_share_a_prediction_and_a_form_and_what_lies_beyond_the_context_costs_nothing(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, seed=1, speculative=RequestSpeculation(prediction="ab" * 10**6))
    requests = llm.requests(["abc", "abd"], params)
    assert requests[0].prediction is requests[1].prediction is not None
    assert len(requests[0].prediction) <= 2 * llm.max_seq_len
    form = SamplingParams(max_tokens=8, seed=1, structured_outputs=StructuredOutputs(regex="[a-c]{8}"))
    together = [completion.text for completion in llm.generate(["abc", "abd"], form)]
    assert together == [llm.generate(prompt, form)[0].text for prompt in ("abc", "abd")]


@pytest.mark.parametrize(
    "asked", [{"method": "ngram", "prediction": "x"}, {"method": "prediction"}, {"prediction": ""}]
)
def test_a_prediction_and_another_method_exclude_each_other(llm: LLM, asked: dict[str, str]) -> None:
    with pytest.raises(RequestError, match="prediction"):
        llm.generate(PROMPT, SamplingParams(speculative=RequestSpeculation(**asked)))  # type: ignore[arg-type]
