"""Steps that run ahead of the host, done without capture: the engine's tokens, counters and pages, whatever happens.

The oracle is the engine's own step, which sees every token before it takes the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from drafter_checks import tree_paths
from engine_checks import DEPTH, PAGE, ahead, check_idle, make_llm, prompts, said, save_pair
from head_checks import llm_with, make_eagle, make_medusa
from sametoken import LLM, Completion, SamplingParams, embedded
from sametoken.drafters.base import Proposed
from sametoken.drafters.padded import padded
from sametoken.engine.request import Request
from sametoken.options.sampling import RequestSpeculation
from sametoken.runtime.graph_slots import GraphSlots
from sametoken.runtime.graphs import GraphKey
from sametoken.speculation.draft import Draft

Pair = tuple[str, str]
VOCAB = 90


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return save_pair("llama-3", tmp_path_factory.mktemp("captured"))


def counted(completion: Completion) -> tuple[Any, ...]:
    """What was counted; times are left out."""
    stats = completion.speculation
    return stats.target_forwards, stats.emitted, stats.drafted, stats.accepted, stats.accepted_lengths, stats.tried


def compare(models: Pair, work: Any, **options: Any) -> list[GraphKey]:
    """Runs `work` on an engine of each kind; both must say and count the same. Returns the keys of captured steps."""
    plain, other = make_llm(*models, **options), make_llm(*models, **options)
    keys = ahead(other)
    expected, found = work(plain), work(other)
    assert [said(each) for each in found] == [said(each) for each in expected]
    assert [counted(each) for each in found] == [counted(each) for each in expected]
    check_idle(other.engine)
    return keys


METHODS = [None, "none"]


@pytest.mark.cover
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("method", METHODS)
def test_the_tokens_are_the_same(models: Pair, method: str | None, count: int, temperature: float) -> None:
    """Requests of different lengths, over several pages; the last ones to go on run in smaller batches."""
    params = [
        SamplingParams(temperature=temperature, seed=7 + i, max_tokens=n, ignore_eos=True)
        for i, n in enumerate((40, 11, 26)[:count])
    ]
    keys = compare(models, lambda llm: llm.generate(prompts(count, VOCAB), params), method=method)
    assert len(keys) > 10
    assert {key.depth for key in keys} == {0 if method == "none" else DEPTH}
    assert {key.batch for key in keys} == ({1} if count == 1 else {1, 2, 4})


def test_the_tokens_are_the_same_in_bfloat16(models: Pair) -> None:
    """Bit for bit, by whatever kernels compute it here; three rows in four graph slots."""
    params = [SamplingParams(temperature=0.9, seed=i, max_tokens=n, ignore_eos=True) for i, n in enumerate((30, 24, 9))]
    assert compare(models, lambda llm: llm.generate(prompts(3, VOCAB), params), dtype="bfloat16")


def test_every_rule_of_sampling_that_needs_no_history(models: Pair) -> None:
    params = [
        SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=20),
        SamplingParams(temperature=1.2, top_k=20, min_p=0.05, seed=2, max_tokens=20),
        SamplingParams(temperature=0.0, logit_bias={5: 3.0, 9: -100.0}, max_tokens=20),
        SamplingParams(temperature=1.0, seed=4, min_tokens=9, stop_token_ids=range(3, 60), max_tokens=20),
    ]
    work = lambda llm: llm.generate(prompts(4, VOCAB), params)  # noqa: E731
    assert len({key.sampling for key in compare(models, work)}) > 1


HISTORY: dict[str, list[dict[str, Any]]] = {
    "penalties": [{"repetition_penalty": 1.3}, {"presence_penalty": 0.8, "frequency_penalty": 0.6}, {}],
    "bad words": [
        {"bad_words": ["k", "ab"]},
        {},
        {"bad_words": [a + b for a in "abcdefgh" for b in "ijklmnop"] + ["cde"]},
    ],
    "both": [{"bad_words": ["ab"], "repetition_penalty": 0.6}, {"frequency_penalty": 1.5}, {"bad_words": ["xy"]}],
}


@pytest.mark.cover
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rules", HISTORY)
def test_rules_that_look_back_are_kept_on_the_device(
    models: Pair, rules: str, method: str | None, temperature: float
) -> None:
    """Every token counts at once, also those that the host has not read yet; padding slots change nothing."""
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=30 - 9 * i, ignore_eos=True, **rule)
        for i, rule in enumerate(HISTORY[rules])
    ]
    keys = compare(models, lambda llm: llm.generate(prompts(3, VOCAB), params), method=method)
    assert 4 in {key.batch for key in keys}


TREE = ((0,), (1,), (0, 0), (2,), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0), (0, 0, 0, 0))
BRANCHING = {"tree_top_k": 3, "max_total_draft_tokens": 7}
EMBEDDED = (str(embedded.TARGET), str(embedded.HEAD))
KINDS: dict[str, Callable[..., LLM]] = {
    "draft tree": lambda models, **options: make_llm(*models, **BRANCHING, **options),
    "trained head": lambda models, **options: make_llm(*EMBEDDED, **options),
    "trained head tree": lambda models, **options: make_llm(*EMBEDDED, **BRANCHING, **options),
    "eagle1": lambda models, **options: llm_with(models[0], make_eagle(models[0], 1), **options),
    "eagle1 tree": lambda models, **options: llm_with(models[0], make_eagle(models[0], 1), **BRANCHING, **options),
    "eagle3 reduced": lambda models, **options: llm_with(
        models[0], make_eagle(models[0], 3, draft_vocab_size=40, layers=2), **options
    ),
    "medusa": lambda models, **options: llm_with(models[0], make_medusa(models[0]), **options),
    "medusa tree": lambda models, **options: llm_with(models[0], make_medusa(models[0], choices=TREE), **options),
}
Seen = dict[tuple[int, int], set[tuple[int, ...]]]  # by row and committed length the paths of a draft


def noted_on_host(llm: LLM) -> Seen:
    """What the engine's drafter proposes from now on."""
    drafter, seen, propose = llm.engine.drafters[llm.method], {}, llm.engine.drafters[llm.method].propose

    def noted(rows: Sequence[int], pending: Sequence[int], *rest: Any) -> Proposed:
        proposed = propose(rows, pending, *rest)
        draft = padded(pending, proposed.drafts)
        for place, row in enumerate(rows):
            seen[row, llm.engine.rows[row].committed] = set(tree_paths(draft, place))
        return proposed

    drafter.propose = noted  # type: ignore[method-assign]
    return seen


def noted_in_steps(llm: LLM) -> Seen:
    """What captured steps propose from now on, for graph slots that are no padding."""
    assert llm.engine.captured is not None
    proposer, seen = llm.engine.captured.proposers[llm.method], {}
    llm.engine.captured.graphs.captures = False  # reading values is not allowed in a capture
    guess = proposer.guess

    def noted(graph_slots: GraphSlots, *rest: Any) -> Draft:
        places = zip(graph_slots.rows.tolist(), graph_slots.lengths.tolist(), graph_slots.active.tolist(), strict=True)
        where = [(row, length, slot) for slot, (row, length, active) in enumerate(places) if active]
        draft = guess(graph_slots, *rest)
        seen.update({(row, length): set(tree_paths(draft, slot)) for row, length, slot in where})
        return draft

    proposer.guess = noted  # type: ignore[method-assign]
    return seen


RULES: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.9}, {"top_k": 12, "logit_bias": {5: 2.0}}]


@pytest.mark.cover
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_heads_and_trees_guess_what_they_guess_on_the_host(models: Pair, kind: str, rule: dict[str, Any]) -> None:
    """After the same tokens, up to the last one, so the counters agree too."""
    plain, other = KINDS[kind](models), KINDS[kind](models)
    keys, expected_drafts = ahead(other), noted_on_host(plain)
    drafts, left = noted_in_steps(other), noted_on_host(other)
    params = [SamplingParams(**rule, seed=7 + i, max_tokens=n, ignore_eos=True) for i, n in enumerate((30, 9, 20))]
    expected, found = plain.generate(prompts(3, VOCAB), params), other.generate(prompts(3, VOCAB), params)
    assert [said(each) for each in found] == [said(each) for each in expected]
    assert [counted(each) for each in found] == [counted(each) for each in expected]
    assert len(keys) > 8
    assert len(drafts) > 10
    both = {place: drafts.get(place, left.get(place)) for place in expected_drafts}
    assert both == expected_drafts
    check_idle(other.engine)


@pytest.mark.parametrize("kind", ["draft tree", "trained head", "trained head tree", "medusa tree"])
def test_heads_and_trees_go_on_where_a_session_ended(models: Pair, kind: str) -> None:
    """A request that needs the host comes and goes; the next turn of the conversation reads the pages of both."""

    def work(llm: LLM) -> list[Completion]:
        first = request_of(llm, prompts(3, VOCAB)[2], 36)
        llm.engine.add(first)
        for step in range(200):
            if step == 5:
                logprobs = SamplingParams(temperature=0.0, logprobs=2, max_tokens=5, ignore_eos=True)
                llm.engine.add(llm.make_requests(prompts(2, VOCAB)[1], logprobs)[0])
            if not llm.engine.busy:
                break
            llm.engine.step()
        params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
        return llm.generate([*first.tokens, 7], params)

    plain, other = KINDS[kind](models, max_seq_len=128), KINDS[kind](models, max_seq_len=128)
    expected_drafts, keys = noted_on_host(plain), ahead(other)
    drafts, left = noted_in_steps(other), noted_on_host(other)
    expected, found = work(plain), work(other)
    assert [said(each) for each in found] == [said(each) for each in expected]
    assert [counted(each) for each in found] == [counted(each) for each in expected]
    assert found[0].cached_tokens == expected[0].cached_tokens >= 40
    assert keys
    assert {place: left.get(place, drafts.get(place)) for place in expected_drafts} == expected_drafts
    check_idle(other.engine)


NEEDS_HOST: list[dict[str, Any]] = [
    {"logprobs": 2},
    {"speculative": RequestSpeculation(method="ngram")},
    {"speculative": RequestSpeculation(steps=True)},
]


@pytest.mark.parametrize("needs_history", NEEDS_HOST)
def test_what_needs_the_host_is_left_to_the_engine(models: Pair, needs_history: dict[str, Any]) -> None:
    """As long as such a request runs; then the others go ahead."""

    def work(llm: LLM) -> list[Completion]:
        special = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, **needs_history)
        simple = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
        return llm.generate(prompts(2, VOCAB), [special, simple])

    assert {key.batch for key in compare(models, work)} == {1}


def test_stops_are_noticed_late_and_the_surplus_is_thrown_away(models: Pair) -> None:
    plain = make_llm(*models)
    prompt = prompts(3, VOCAB)[1]
    text = plain.generate(prompt, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))[0]
    for place in range(3, 9):
        token = text.token_ids[place]
        compare(
            models,
            lambda llm, token=token: llm.generate(
                prompt, SamplingParams(temperature=0.0, stop_token_ids=[token], max_tokens=30, ignore_eos=True)
            ),
        )
    stop = text.text[9:12]
    compare(models, lambda llm: llm.generate(prompt, SamplingParams(temperature=0.0, stop=[stop], max_tokens=30)))


def request_of(llm: LLM, prompt: Sequence[int], tokens: int, seed: int = 3) -> Request:
    params = SamplingParams(temperature=0.7, seed=seed, max_tokens=tokens, ignore_eos=True)
    return llm.make_requests(list(prompt), params)[0]


@pytest.mark.parametrize("method", METHODS)
def test_some_join_later_and_one_leaves(models: Pair, method: str | None) -> None:
    """The tokens of the others do not notice; the pages of all come back."""

    def work(llm: LLM) -> list[list[int]]:
        first, gone, late = (request_of(llm, p, n) for p, n in zip(prompts(3, VOCAB), (30, 40, 18), strict=True))
        engine = llm.engine
        engine.add(first)
        engine.add(gone)
        for step in range(200):
            if step == 6:
                engine.add(late)
            if step == 12:
                engine.abort(gone.id)
            if not engine.busy:
                break
            engine.step()
        check_idle(engine)
        return [first.output_ids, late.output_ids]

    other = make_llm(*models, method=method)
    keys = ahead(other)
    assert work(other) == work(make_llm(*models, method=method))
    assert {key.batch for key in keys} >= {2, 4}


def test_a_conversation_goes_on_over_pages_that_were_written_ahead(models: Pair) -> None:
    """What a session leaves in the cache, the draft's part too, is what the engine's own step would have left."""

    def work(llm: LLM) -> list[Completion]:
        params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
        turn = prompts(3, VOCAB)[2]
        said_so_far = []
        for _ in range(2):
            said_so_far += llm.generate(turn, params)
            turn = [*turn, *said_so_far[-1].token_ids, 5]
        return said_so_far

    plain, other = make_llm(*models, max_seq_len=128), make_llm(*models, max_seq_len=128)
    ahead(other)
    expected, found = work(plain), work(other)
    assert [said(each) for each in found] == [said(each) for each in expected]
    assert found[1].cached_tokens >= 40
    # A draft that read the wrong keys would be wrong more often.
    assert found[1].speculation.accepted == expected[1].speculation.accepted


def test_few_pages_and_few_rows(models: Pair) -> None:
    """Where there is no room to run ahead the engine's own step preempts, and all end as they would have."""
    params = [SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, seed=i) for i in range(5)]
    tight = {"cache": {"max_tokens": 11 * PAGE}, "max_batch_size": 2, "max_seq_len": 72}
    plain, other = make_llm(*models, **tight), make_llm(*models, **tight)
    keys = ahead(other)
    expected, found = (llm.generate(prompts(5, VOCAB, longest=20), params) for llm in (plain, other))
    assert [said(each) for each in found] == [said(each) for each in expected]
    assert keys
    check_idle(other.engine)


def test_the_context_ends_under_a_step_that_is_ahead(models: Pair) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    keys = compare(models, lambda llm: llm.generate(prompts(3, VOCAB), params), max_seq_len=64)
    assert keys


def test_the_host_is_a_step_behind(models: Pair) -> None:
    """After the first step of a session nothing is known; from the second on one step is always under way."""
    llm = make_llm(*models, method="none")
    keys = ahead(llm)
    request = request_of(llm, prompts(2, VOCAB)[1], 12)
    llm.engine.add(request)
    while not keys:
        llm.engine.step()
    known = len(request.output_ids)
    assert llm.engine.step().requests == [request]
    assert (len(keys), len(request.output_ids)) == (2, known + 1)
    while llm.engine.busy:
        llm.engine.step()
    # Nothing was computed beyond the last token, whose number was known beforehand.
    assert len(keys) == len(request.output_ids) - known
