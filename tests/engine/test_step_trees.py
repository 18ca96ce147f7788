"""The tree of guesses of every forward that a request may ask for: what it says, and that it changes nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from sametoken import LLM, RequestSpeculation, SamplingParams
from sametoken.engine.completion import Completion
from sametoken.engine.step_tree import StepTree

PROMPT = "Hello! What do you like to do for fun?"
TREES = {"chain": {"max_draft_len": 3}, "tree": {"max_draft_len": 3, "tree_top_k": 2, "max_total_draft_tokens": 5}}


@pytest.fixture(scope="module", params=TREES)
def llm(request: pytest.FixtureRequest, one_thread: None) -> LLM:
    return LLM("embedded", "embedded", {**TREES[request.param], "adaptive": False}, max_batch_size=2, max_seq_len=128)


def completed(llm: LLM, temperature: float, steps: bool = True) -> Completion:
    speculative = RequestSpeculation(steps=steps)
    params = SamplingParams(temperature=temperature, max_tokens=24, seed=3, logprobs=0, speculative=speculative)
    return llm.generate(llm.render_chat([{"role": "user", "content": PROMPT}]), params)[0]


def emitted(found: Completion) -> Iterator[tuple[StepTree, int]]:
    """Every forward's tree, with the place in the output of the first token that the forward brought."""
    place = 0
    for step in found.steps or ():
        yield step, place
        place += sum(step.accepted) + 1
    assert place in (
        len(found.token_ids),
        len(found.token_ids) + 1,
    )  # an end inside a path has no token of the target's


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_was_accepted_is_what_came_out(llm: LLM, temperature: float) -> None:
    found = completed(llm, temperature)
    assert found.steps is not None
    assert found.logprobs is not None
    assert len(found.steps) == found.speculation.target_forwards
    assert sum(len(step.token_ids) for step in found.steps) == found.speculation.drafted
    assert found.steps[0] == StepTree()  # the forward that read the prompt
    assert sum(sum(step.accepted) for step in found.steps) == found.speculation.accepted > 0
    assert all(step.drafters == ((step.drafter,),) * len(step.token_ids) for step in found.steps)
    for step, place in emitted(found):
        last = -1
        for at in (at for at, accepted in enumerate(step.accepted) if accepted):
            assert (step.parents[at], step.token_ids[at]) == (last, found.token_ids[place])
            assert step.probabilities[at] == pytest.approx(math.exp(found.logprobs[place].logprob))
            last, place = at, place + 1
        if place < len(found.token_ids):
            untaken = [token for token, parent in zip(step.token_ids, step.parents, strict=True) if parent == last]
            assert tuple(untaken) == found.rejected[place]


def test_probabilities_of_rejected_guesses_are_the_targets(llm: LLM) -> None:
    """The oracle scores each path as a prompt, in a forward without any tree."""
    found = completed(llm, 1.0)
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, speculative=RequestSpeculation(False))
    checked = 0
    for step, place in list(emitted(found))[:12]:
        for at, accepted in enumerate(step.accepted):
            path = []
            node = at
            while node >= 0:
                path.insert(0, step.token_ids[node])
                node = step.parents[node]
            before = [*found.prompt_token_ids, *found.token_ids[:place]]
            told = (llm.generate([*before, *path], scored)[0].prompt_logprobs or [])[-1]
            assert told is not None
            assert step.probabilities[at] == pytest.approx(math.exp(told.logprob), rel=1e-4)
            checked += not accepted
    assert checked > 1


def test_nothing_is_kept_by_default_and_no_token_depends_on_it(llm: LLM) -> None:
    asked, usual = completed(llm, 1.0), completed(llm, 1.0, steps=False)
    assert usual.steps is None
    assert "steps" not in usual.to_json()
    assert usual.token_ids == asked.token_ids
    assert asked.to_json()["steps"][0] == {
        "drafter": None, "token_ids": [], "parents": [], "probabilities": [], "accepted": [], "drafters": [],
    }  # fmt: skip
    assert {step["drafter"] for step in asked.to_json()["steps"][1:]} <= {"draft_target", None}
