"""Stopping within an accepted draft, streaming, cancelling: what a request leaves behind is trimmed together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from adversaries import adversaries
from cli_checks import LETTERS, SPECIAL, Pair
from engine_checks import (
    BYTE_VOCAB,
    DEPTH,
    alone,
    check_idle,
    inject,
    llama,
    make_llm,
    prompts,
    said,
    speak_bytes,
    using,
)
from sametoken import LLM, Completion, SamplingParams
from sametoken.engine.plan import Plan
from sametoken.engine.request import Request
from tiny_models import VOCAB

PROMPT = [9, 10, 11, 12, 13]
# Only letters are drawn, so that a token is a character.
LETTERS_ONLY = dict.fromkeys((*range(len(SPECIAL)), *range(len(SPECIAL) + len(LETTERS), VOCAB)), -100.0)
PARAMS = SamplingParams(temperature=0.8, seed=4, max_tokens=14, ignore_eos=True, logprobs=1, logit_bias=LETTERS_ONLY)
FULL = SamplingParams(temperature=0.8, seed=1, max_tokens=None, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def pair(tiny_pair: Pair) -> Iterator[Pair]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tiny_pair
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def replaying(pair: Pair) -> tuple[LLM, Completion]:
    """An engine with drafters that know what follows the prompt, and what follows it."""
    llm = make_llm(pair.target, pair.draft)
    truth = alone(llm, PROMPT, PARAMS)
    inject(llm, adversaries([PROMPT + truth.token_ids], VOCAB, DEPTH, 8))
    return llm, truth


def trimmed(completion: Completion) -> None:
    """Everything that is counted per token is counted for the tokens that were kept."""
    stats, emitted = completion.speculation, len(completion.token_ids)
    assert len(completion.origins) == len(completion.rejected) == emitted == stats.emitted
    assert completion.logprobs is not None
    assert [item.token_id for item in completion.logprobs] == completion.token_ids
    assert completion.origins.count(True) == stats.accepted
    assert sum(accepted * times for accepted, times in enumerate(stats.accepted_lengths)) == stats.accepted
    assert sum(stats.accepted_lengths) == stats.target_forwards
    assert sum(stats.drafted_lengths) == stats.target_forwards
    assert sum(length * times for length, times in enumerate(stats.drafted_lengths)) <= stats.drafted
    assert sum(stats.tried[:1]) == sum(stats.drafted_lengths[1:]) >= sum(stats.accepted_lengths[1:])
    assert stats.accepted <= stats.drafted


def ends(truth: Completion) -> list[tuple[str, int, dict[str, Any]]]:
    """Ways to end after every possible number of tokens: name, tokens, parameters."""
    ids, text = truth.token_ids, truth.text
    assert len(text) == len(ids), "tokens are letters"
    found: list[tuple[str, int, dict[str, Any]]] = []
    for kept in range(1, len(ids)):
        found.append(("length", kept, {"max_tokens": kept}))
        if ids[kept - 1] not in ids[: kept - 1]:
            found.append(("stop id", kept, {"stop_token_ids": [ids[kept - 1]]}))
        if kept > 1 and text.find(text[kept - 2 : kept]) == kept - 2:
            found.append(("stop string", kept, {"stop": ["!?", text[kept - 2 : kept]]}))
    return found


def test_a_request_ends_at_its_token_in_the_middle_of_an_accepted_draft(replaying: tuple[LLM, Completion]) -> None:
    llm, truth = replaying
    within = 0
    for name, kept, options in ends(truth):
        params = replace(PARAMS, **options)
        plain = alone(llm, PROMPT, params)
        assert plain.token_ids == truth.token_ids[:kept], (name, kept)
        got = llm.generate(PROMPT, using(params, "right"))[0]
        assert said(got) == said(plain), (name, kept)
        trimmed(got)
        assert got.finish_reason == ("length" if name == "length" else "stop")
        if name == "stop string":
            assert got.text == truth.text[: kept - 2]
        within += got.origins[-1]
    assert within > 10
    check_idle(llm.engine)


def test_the_models_own_end_has_no_reason_and_a_stop_id_is_its_own(replaying: tuple[LLM, Completion]) -> None:
    llm, truth = replaying
    # The end becomes so likely that it comes before the length does.
    params = replace(PARAMS, ignore_eos=False, logit_bias={2: 12.0})
    plain = alone(llm, PROMPT, params)
    got = llm.generate(PROMPT, using(params, "draft_target"))[0]
    assert said(got) == said(plain)
    assert (got.finish_reason, got.stop_reason, got.token_ids[-1]) == ("stop", None, 2)
    stopped = llm.generate(PROMPT, using(replace(PARAMS, stop_token_ids=[truth.token_ids[2]]), "right"))[0]
    assert stopped.stop_reason == truth.token_ids[2]


def test_the_context_ends_a_request_wherever_a_draft_stands(pair: Pair) -> None:
    llm = make_llm(pair.target, pair.target, max_seq_len=24)
    for length in range(1, 24, 3):
        prompt = prompts(3)[2][:length]
        got = llm.generate(prompt, FULL)[0]
        assert len(got.token_ids) == 24 - length
        assert got.finish_reason == "length"
        assert said(got) == said(alone(llm, prompt, FULL))
        trimmed(got)
        assert got.speculation.accepted == got.speculation.drafted, "drafted what cannot be emitted"
    check_idle(llm.engine)


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """A model that writes bytes, words and characters of several bytes, drafted by itself."""
    root = tmp_path_factory.mktemp("bytes")
    target = llama(root, vocab_size=BYTE_VOCAB, num_hidden_layers=1)
    speak_bytes(root)
    return make_llm(target, target, tree_top_k=2)


@pytest.mark.parametrize("stop", [(), ("END", "s"), (" the c", "\u0001")])
def test_a_stream_adds_up_to_the_text(bytewise: LLM, stop: Sequence[str]) -> None:
    common = SamplingParams(temperature=1.0, max_tokens=40, stop=stop, ignore_eos=True, seed=8, n=4)
    # Words, the three bytes of one character, and others, so that whole characters and stop strings come up.
    biased = replace(common, logit_bias={**{BYTE_VOCAB - i: 3.0 for i in range(1, 10)}, 229: 3.0, 154: 3.0})
    plain = bytewise.generate([5, 6], using(biased, "none"))
    for method in ("none", "draft_target"):
        parts: list[list[str]] = [[] for _ in plain]
        tokens: list[list[int]] = [[] for _ in plain]
        final: dict[int, Completion] = {}
        for chunk in bytewise.stream([5, 6], using(biased, method)):
            parts[chunk.choice].append(chunk.text)
            tokens[chunk.choice] += chunk.token_ids
            assert len(chunk.origins) == len(chunk.token_ids)
            if chunk.completion is not None:
                final[chunk.choice] = chunk.completion
        for choice, expected in enumerate(plain):
            assert said(final[choice]) == said(expected)
            assert "".join(parts[choice]) == expected.text
            assert tokens[choice] == expected.token_ids
            assert not any(each in expected.text for each in stop)
    if stop:
        assert {completion.finish_reason for completion in plain} >= {"stop"}


@pytest.mark.parametrize("pieces", [512, 7])
def test_prompt_logprobs_are_the_models_own(pair: Pair, pieces: int) -> None:
    llm = make_llm(pair.target, pair.draft, max_num_tokens=pieces)
    prompt = prompts(3)[2]
    with torch.no_grad():
        expected = pair.oracle(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    for _ in range(2):  # pages of the first are not reused: they hold no log-probabilities
        got = llm.generate(prompt, SamplingParams(max_tokens=3, prompt_logprobs=2, seed=0))[0].prompt_logprobs
        assert got is not None
        assert got[0] is None
        for place, item in enumerate(got[1:]):
            assert item is not None
            assert item.token_id == prompt[place + 1]
            assert item.logprob == pytest.approx(float(expected[place, item.token_id]), abs=1e-4)
            assert item.rank == 1 + int((expected[place] > expected[place, item.token_id]).sum())
            assert [token for token, _ in item.top] == expected[place].topk(2).indices.tolist()


def test_preempted_prompts_keep_their_logprobs(pair: Pair) -> None:
    params = SamplingParams(temperature=0.8, seed=2, max_tokens=20, ignore_eos=True, prompt_logprobs=1)
    llm = make_llm(pair.target, pair.draft, max_seq_len=72, cache={"max_tokens": 100})
    expected = [alone(llm, prompt, params) for prompt in prompts(6)]
    assert [said(got) for got in llm.generate(prompts(6), params)] == [said(each) for each in expected]


def test_what_a_preempted_request_finds_of_its_own_is_no_reuse(pair: Pair) -> None:
    llm = make_llm(pair.target, pair.target, max_seq_len=72, max_mixed_prefill_tokens=5, cache={"max_tokens": 80})
    growing, long = llm.requests([PROMPT, prompts(3)[2]], [replace(PARAMS, max_tokens=n) for n in (60, 8)])
    found: list[int] = []
    plan = llm.engine.scheduler.plan

    def watched() -> Plan:
        made = plan()
        found.extend(admission.cached for admission in made.admitted if admission.id == long.id)
        return made

    llm.engine.scheduler.plan = watched  # type: ignore[method-assign]
    llm.engine.add(growing)
    llm.engine.step()
    llm.engine.add(long)
    while llm.engine.busy:
        llm.engine.step()
    # First preempted before its prompt was read, then found the pages it had filled itself.
    assert found[0] == 0 < found[-1]
    assert long.cached_tokens == 0


def test_cancelling_frees_at_once_and_disturbs_nobody(pair: Pair) -> None:
    llm = make_llm(pair.target, pair.draft, max_batch_size=2, cache={"enable_block_reuse": False})
    expected = [alone(llm, prompt, PARAMS) for prompt in prompts(4)]
    requests = [llm.make_requests(prompt, PARAMS)[0] for prompt in prompts(4)]
    for request in requests:
        llm.engine.add(request)
    llm.engine.step()
    blocks = llm.engine.scheduler.blocks
    before = blocks.available
    llm.engine.abort(requests[0].id)  # running
    llm.engine.abort(requests[3].id)  # waiting
    assert blocks.available > before
    assert [requests[0].finish_reason, requests[3].finish_reason] == ["abort", "abort"]
    llm.engine.step()
    assert requests[2].row is not None, "the row was not given on"
    while llm.engine.busy:
        llm.engine.step()
    assert [requests[i].output_ids for i in (1, 2)] == [expected[i].token_ids for i in (1, 2)]
    llm.engine.abort(requests[1].id)  # long gone
    assert requests[1].finish_reason == "length"
    check_idle(llm.engine)


def test_closing_a_stream_cancels_what_it_left(pair: Pair) -> None:
    llm = make_llm(pair.target, pair.draft)
    stream = llm.stream(prompts(4), PARAMS)
    next(stream)
    assert llm.engine.busy
    stream.close()  # type: ignore[attr-defined]
    check_idle(llm.engine)


def test_streams_go_on_in_every_step_of_a_long_prompt(pair: Pair) -> None:
    llm = make_llm(pair.target, pair.draft, max_mixed_prefill_tokens=5)
    running = llm.make_requests(PROMPT, replace(PARAMS, max_tokens=60))[0]
    llm.engine.add(running)
    llm.engine.step()
    late = llm.make_requests(prompts(3)[2], PARAMS)[0]
    llm.engine.add(late)
    steps = 0
    while late.first_token is None:
        assert running in llm.engine.step().requests
        steps += 1
    assert steps == 8  # 40 tokens, 5 a step
    llm.engine.abort(running.id)
    llm.engine.abort(late.id)


class Serving(RuleBasedStateMachine):
    """Requests of all kinds come and go in an engine with too few pages; whoever stays says what it says alone."""

    llm: LLM
    expected: dict[tuple[int, float, int], list[int]]

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[Request, tuple[int, float, int]]] = {}

    @rule(
        which=st.integers(0, 5),
        temperature=st.sampled_from([0.0, 0.9]),
        tokens=st.sampled_from([1, 5, 16]),
        method=st.sampled_from(["none", "draft_target", "ngram", "suffix", "bush"]),
    )
    def add(self, which: int, temperature: float, tokens: int, method: str) -> None:
        params = SamplingParams(temperature=temperature, seed=which, max_tokens=tokens, ignore_eos=True)
        request = self.llm.make_requests(prompts(6)[which], using(params, method))[0]
        self.alive[request.id] = request, (which, temperature, tokens)
        self.llm.engine.add(request)

    @rule()
    def step(self) -> None:
        self.llm.engine.step()
        for number in [number for number, (request, _) in self.alive.items() if request.finish_reason is not None]:
            request, (which, temperature, tokens) = self.alive.pop(number)
            assert request.output_ids == self.expected[which, temperature, 16][:tokens]
        self.llm.engine.scheduler.blocks.check()

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.alive)))
        request, (which, temperature, _) = self.alive.pop(number)
        self.llm.engine.abort(number)
        assert request.output_ids == self.expected[which, temperature, 16][: len(request.output_ids)]

    def teardown(self) -> None:
        for done in count():
            if not self.alive:
                break
            assert done < 1000, "it never ends"
            self.step()
        check_idle(self.llm.engine)


def test_any_coming_and_going_leaves_tokens_and_pages_right(pair: Pair) -> None:
    llm = make_llm(pair.target, pair.draft, tree_top_k=2, max_seq_len=72, max_batch_size=4, cache={"max_tokens": 120})
    Serving.llm, Serving.expected = llm, {}
    for which, prompt in enumerate(prompts(6)):
        for temperature in (0.0, 0.9):
            params = SamplingParams(temperature=temperature, seed=which, max_tokens=16, ignore_eos=True)
            Serving.expected[which, temperature, 16] = alone(llm, prompt, params).token_ids
    truths = [prompts(6)[which] + ids for (which, *_), ids in Serving.expected.items()]
    inject(llm, adversaries(truths, VOCAB, DEPTH, 8))
    run_state_machine_as_test(
        Serving,
        settings=settings(
            max_examples=12, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
