"""Draws follow the processed distribution; ties, degenerate scores and log-probabilities are exact."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from sametoken.errors import RequestError
from sametoken.options.sampling import SamplingParams
from sametoken.speculation.draft import PADDING, Draft, ancestors, chain_parents
from sametoken.speculation.noise import noise
from sametoken.speculation.sampling import Sampling, rank, sample, token_logprobs
from sampling_checks import BAD_WORDS, END, EVERYTHING, V, draw_after, kept, params_of, reference, row, tokens_of


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 4},
        {"top_k": 4, "temperature": 0.7},
        {"top_p": 0.8},
        {"top_p": 0.6, "temperature": 0.7},
        {"min_p": 0.1},
        {"min_p": 0.05, "top_k": 8, "top_p": 0.9, "temperature": 1.4},
        {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.4},
        {"logit_bias": {0: 1.5, 3: -100}},
        {**EVERYTHING, "temperature": 0.9},
    ],
    ids=str,
)
def test_frequencies_match_the_enumerated_distribution(options: dict[str, Any]) -> None:
    """Chi-square of 6000 independent draws, over seeds and positions alike."""
    params = SamplingParams(**options)
    logits = torch.randn(V, generator=torch.Generator().manual_seed(1)) * 1.5
    prompt, output = [1, 2, 5], [5, 6, 0]
    expected = reference(logits.numpy(), params, prompt, output, ends=END, words=BAD_WORDS)
    sampling = Sampling.of(
        [row(params, prompt, output, seed=seed, ends=END, words=BAD_WORDS) for seed in range(-30, 30)]
    )
    counts = np.zeros(V)
    for position in range(5, 105):
        parents = chain_parents(60, 1)
        draft = Draft(torch.zeros_like(parents), parents)
        # The end ban looks at positions, so it is lifted here by moving none: all draws are of one output length.
        late = sampling if params.min_tokens == 0 else _frozen_end_ban(sampling)
        drawn = sample(logits.expand(60, 1, V), draft, ancestors(parents), torch.full((60,), position), late)
        counts += np.bincount(drawn.flatten().numpy(), minlength=V)
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    assert stats.chisquare(counts[possible], expected[possible] * counts.sum()).pvalue > 1e-3


def _frozen_end_ban(sampling: Sampling) -> Sampling:
    assert sampling.end_ban is not None
    forever = sampling.end_ban._replace(until=torch.full_like(sampling.end_ban.until, 10**9))
    return dataclasses.replace(sampling, end_ban=forever)


@settings(max_examples=200, deadline=None)
@given(params_of(), tokens_of, tokens_of, st.integers(0, 2**40), st.booleans())
def test_draw_is_argmax_of_p_over_e(
    params: SamplingParams, prompt: list[int], output: list[int], seed: int, bad: bool
) -> None:
    prompt = [0, *prompt]
    words = BAD_WORDS if bad else []
    logits = torch.randn(V, generator=torch.Generator().manual_seed(seed)) * 3
    p = reference(logits.numpy(), params, prompt, output, ends=END, words=words)
    position = len(prompt) + len(output)
    e = noise(torch.tensor([seed]), torch.tensor([position]), torch.arange(V))[0].double().numpy()
    state = row(params, prompt, output, seed=seed, ends=END, words=words)
    got = draw_after([state], logits.unsqueeze(0), [position - 1]).item()
    race = p if params.greedy else p / e
    assert race[got] >= race.max() * (1 - 1e-4)  # float32 may decide a tie of one part in ten thousand


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32), st.floats(0.3, 2), st.integers(1, 100), st.floats(0.05, 0.999), st.floats(0.001, 0.9))
def test_kept_sets_are_those_of_transformers(seed: int, t: float, k: int, p: float, min_p: float) -> None:
    size = 100
    logits = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 3
    scores = TemperatureLogitsWarper(t)(None, logits.unsqueeze(0))

    def theirs(*warpers: Any) -> set[int]:
        z = scores
        for warper in warpers:
            z = warper(None, z)
        return set((z[0] > -math.inf).nonzero().flatten().tolist())

    def ours(**options: Any) -> set[int]:
        return kept(logits, SamplingParams(temperature=t, **options), size)

    assert ours(top_k=k) == theirs(TopKLogitsWarper(k))
    assert ours(min_p=min_p) == theirs(MinPLogitsWarper(min_p))
    assert ours(top_p=p) == theirs(TopPLogitsWarper(p))
    together = theirs(MinPLogitsWarper(min_p), TopKLogitsWarper(k), TopPLogitsWarper(p))
    assert ours(top_k=k, top_p=p, min_p=min_p) == together


@settings(max_examples=50, deadline=None)
@given(tokens_of, tokens_of, st.floats(0.5, 2), st.integers(0, 2**32))
def test_repetition_penalty_is_that_of_transformers(
    prompt: list[int], output: list[int], penalty: float, seed: int
) -> None:
    context = [0, *prompt, *output]
    logits = torch.randn(1, V, generator=torch.Generator().manual_seed(seed)) * 3
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([context]), logits).log_softmax(-1)
    params = SamplingParams(temperature=0, repetition_penalty=penalty)
    sampling = Sampling.of([row(params, [0, *prompt], output)])
    tokens, scores = rank(logits, torch.tensor([len(context)]), sampling, V)
    torch.testing.assert_close(scores, theirs.gather(1, tokens), rtol=1e-5, atol=1e-5)


def test_ties_go_to_the_lowest_ids_in_every_path() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 3.0, 3.0, -0.0, 1.0, 3.0] + [-5.0] * 4)
    assert kept(logits, SamplingParams(top_k=3)) == {1, 3, 4}
    assert kept(logits, SamplingParams(top_k=5)) == {1, 2, 3, 4, 7}
    assert kept(logits, SamplingParams(top_p=0.3)) == {1, 3}
    assert kept(torch.zeros(V), SamplingParams(top_p=0.5)) == set(range(6))
    assert kept(torch.tensor([-0.0, 0.0] * 6), SamplingParams(top_k=5)) == set(range(5))
    rows = [
        row(SamplingParams(temperature=0)),
        row(SamplingParams(top_k=1)),
        row(SamplingParams()),
        row(SamplingParams()),
    ]
    assert draw_after(rows, logits.expand(4, V), [9] * 4)[:2].tolist() == [1, 1]
    assert draw_after(rows[:1], logits.expand(1, V), [9]).tolist() == [1]
    assert draw_after(rows[:2], logits.expand(2, V), [9] * 2).tolist() == [1, 1]


@pytest.mark.parametrize("temperature", [1e-40, 1e-9, 1e30, 1e300])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    logits = torch.tensor([[1.0, 1.0 + 2**-20, -math.inf, 0.5] + [-3.0] * 8])
    drawn = {draw_after([row(SamplingParams(temperature=temperature), seed=s)], logits, [4]).item() for s in range(150)}
    assert drawn == ({1} if temperature < 1 else set(range(V)) - {2})


def test_banned_scores_are_never_drawn_or_ranked_first() -> None:
    logits = torch.full((1, V), -math.inf)
    logits[0, 5] = -1e38
    for options in ({}, {"top_k": 4}, {"top_p": 0.5}, {"min_p": 0.5}, {"temperature": 0}, {"repetition_penalty": 2.0}):
        state = row(SamplingParams(**options))
        assert draw_after([state], logits, [4]).item() == 5
        tokens, scores = rank(logits, torch.tensor([4]), Sampling.of([state]), 2)
        assert tokens[0].tolist() == [5, PADDING]
        assert scores[0].tolist() == [0.0, -math.inf]


def test_nothing_is_carried_for_what_nobody_asks() -> None:
    plain = Sampling.of([row(SamplingParams()), row(SamplingParams(temperature=0.5))])
    assert plain.reusable
    assert not plain.greedy
    assert (plain.truncation, plain.bias, plain.end_ban, plain.words, plain.penalties, plain.noise_scale) == (None,) * 6
    greedy = Sampling.of([row(SamplingParams(temperature=0, top_p=0.5, top_k=3, min_p=0.1))] * 3)
    assert greedy.greedy
    assert greedy.seed is None
    assert not Sampling.of([row(SamplingParams(temperature=0, logit_bias={1: 1}))]).greedy
    assert Sampling.of([row(SamplingParams(), words=[[3]]), row(SamplingParams(min_tokens=3), ends=END)]).reusable
    assert not Sampling.of([row(SamplingParams()), row(SamplingParams(presence_penalty=1))]).reusable
    assert not Sampling.of([row(SamplingParams(), words=[[3, 4]])]).reusable


def test_a_built_batch_does_not_see_later_tokens() -> None:
    state = row(SamplingParams(temperature=0, frequency_penalty=2.0), output=[3])
    before = Sampling.of([state])
    logits = torch.zeros(1, V)
    first = rank(logits, torch.tensor([5]), before, V)
    state.extend([0, 0])
    assert torch.equal(rank(logits, torch.tensor([5]), before, V)[1], first[1])
    assert not torch.equal(rank(logits, torch.tensor([5]), Sampling.of([state]), V)[0], first[0])


@pytest.mark.parametrize(
    ("params", "extra", "name"),
    [
        (SamplingParams(logit_bias={V: 1}), {}, "logit_bias"),
        (SamplingParams(), {"ends": [V]}, "stop_token_ids"),
        (SamplingParams(), {"words": [[1, V]]}, "bad_words"),
        (SamplingParams(), {"words": [[]]}, "bad_words"),
        (SamplingParams(presence_penalty=1), {"prompt": [V]}, "prompt"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(params: SamplingParams, extra: dict[str, Any], name: str) -> None:
    with pytest.raises(RequestError, match=name):
        row(params, **extra)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(0, V))
def test_token_logprobs_are_the_model_s_own(seed: int, rows: int, top: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, V, generator=generator) * 4).bfloat16()
    tokens = torch.randint(0, V, (rows,), generator=generator)
    got = token_logprobs(logits, tokens, top)
    expected = logits.double().log_softmax(-1).numpy()
    assert got.chosen.dtype == got.top_values.dtype == torch.float32
    for r in range(rows):
        order = sorted(range(V), key=lambda token: (-expected[r, token], token))
        assert got.chosen[r].item() == pytest.approx(expected[r, tokens[r]], abs=1e-5)
        assert order[got.rank[r].item() - 1] == tokens[r]
        assert got.top_tokens[r].tolist() == order[:top]
        np.testing.assert_allclose(got.top_values[r].numpy(), expected[r, order[:top]], atol=1e-5)
