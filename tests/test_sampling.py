"""Draws follow the processed distribution, on the node's own path, whatever the batch, the tree or the drafter."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from foretoken.errors import RequestError
from foretoken.speculation.draft import PADDING, Draft, ancestors, chain_parents
from foretoken.speculation.noise import noise
from foretoken.speculation.params import SamplingParams
from foretoken.speculation.sampling import RowSampling, Sampling, rank, sample, token_logprobs
from foretoken.speculation.verify import verify

V = 12
EVERYTHING: dict[str, Any] = {
    "top_k": 9,
    "top_p": 0.95,
    "min_p": 0.02,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "logit_bias": {1: 2.0, 5: -1.5},
    "min_tokens": 6,
}
BAD_WORDS = [[3], [2, 4], [0, 1, 2]]
END = [7, 8]


def row(
    params: SamplingParams,
    prompt: Sequence[int] = (1, 2),
    output: Sequence[int] = (),
    *,
    seed: int = 0,
    vocab: int = V,
    ends: Sequence[int] = (),
    words: Sequence[Sequence[int]] = (),
) -> RowSampling:
    state = RowSampling(params, seed, prompt, vocab, ends, words)
    state.extend(list(output))
    return state


def draw_after(rows: Sequence[RowSampling], logits: Tensor, position: Sequence[int]) -> Tensor:
    """[B] draws of one-node trees from logits [B, V]."""
    parents = chain_parents(len(rows), 1)
    draft = Draft(torch.zeros_like(parents), parents)
    at = torch.tensor(position)
    return sample(logits.unsqueeze(1), draft, ancestors(parents), at, Sampling.of(rows)).squeeze(1)


def reference(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    ends: Sequence[int] = (),
    words: Sequence[Sequence[int]] = (),
) -> np.ndarray:
    """[V] probabilities in float64, one definition after the other."""
    z = logits.astype(np.float64).copy()
    for token, bias in (params.logit_bias or {}).items():
        z[token] += bias
    context = [*prompt, *output]
    for word in words:
        if len(word) == 1 or context[-len(word) + 1 :] == list(word[:-1]):
            z[word[-1]] = -np.inf
    if len(output) < params.min_tokens:
        z[list(ends)] = -np.inf
    for token in set(context):
        z[token] = z[token] / params.repetition_penalty if z[token] > 0 else z[token] * params.repetition_penalty
    for token in set(output):
        z[token] -= params.frequency_penalty * list(output).count(token) + params.presence_penalty
    order = sorted(range(len(z)), key=lambda token: (-z[token], token))
    if params.temperature == 0:
        return np.eye(len(z))[order[0]]
    p = np.exp((z - z.max()) / params.temperature)
    p[p < params.min_p * p.max()] = 0
    if params.top_k > 0:
        p[order[params.top_k :]] = 0
    p /= p.sum()
    before = 0.0
    for token in order:
        if before >= params.top_p:
            p[token] = 0
        before += p[token]
    return p / p.sum()


def kept(logits: Tensor, params: SamplingParams, vocab: int = V, **state: Any) -> set[int]:
    """Tokens that a row can draw: those which `rank` scores above minus infinity."""
    tokens, scores = rank(
        logits.unsqueeze(0), torch.tensor([50]), Sampling.of([row(params, vocab=vocab, **state)]), vocab
    )
    return set(tokens[scores > -math.inf].tolist())


# --- the distribution ---------------------------------------------------------------------------------------------


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
    assert sampling.ends is not None
    forever = sampling.ends._replace(until=torch.full_like(sampling.ends.until, 10**9))
    return dataclasses.replace(sampling, ends=forever)


numbers = st.floats(0.05, 1.0)


@st.composite
def params_of(draw: st.DrawFn, temperature: float | None = None) -> SamplingParams:
    """Any mixture of processors, each off about half of the time."""

    def maybe(neutral: Any, strategy: st.SearchStrategy[Any]) -> Any:
        return draw(st.one_of(st.just(neutral), strategy))

    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.7, 1.0, 1.3])) if temperature is None else temperature,
        top_k=maybe(0, st.integers(1, 14)),
        top_p=maybe(1.0, numbers),
        min_p=maybe(0.0, st.floats(0.001, 0.9)),
        repetition_penalty=maybe(1.0, st.floats(0.6, 2.0)),
        presence_penalty=maybe(0.0, st.floats(-1, 1)),
        frequency_penalty=maybe(0.0, st.floats(-1, 1)),
        logit_bias=maybe(None, st.dictionaries(st.integers(0, V - 1), st.floats(-5, 5), max_size=3)),
        min_tokens=maybe(0, st.integers(1, 8)),
    )


tokens_of = st.lists(st.integers(0, V - 1), max_size=7)


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


# --- ties and degenerate scores -----------------------------------------------------------------------------------


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


# --- one row among others -----------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_row_does_not_depend_on_its_neighbours(data: st.DataObject) -> None:
    """Drawn and ranked bits alone equal those in a batch, where other rows switch other paths on."""
    rows = data.draw(st.integers(2, 5))
    nodes = data.draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    logits = (torch.randn(rows, nodes, V, generator=generator) * 2).to(
        data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    )
    states = [
        row(
            data.draw(params_of()),
            output=data.draw(tokens_of),
            seed=b,
            ends=END,
            words=data.draw(st.sampled_from([[], BAD_WORDS, BAD_WORDS[:1]])),
        )
        for b in range(rows)
    ]
    tokens = torch.randint(-1, V, (rows, nodes), generator=generator)
    parents = torch.tensor([[-1] + [data.draw(st.integers(0, n - 1)) for n in range(1, nodes)] for _ in range(rows)])
    reach, position = ancestors(parents), torch.randint(2, 12, (rows,), generator=generator)
    k = data.draw(st.integers(1, V))
    drawn = sample(logits, Draft(tokens, parents), reach, position, Sampling.of(states))
    ranked = rank(logits[:, 0], position, Sampling.of(states), k)
    frontier = rank(logits, position, Sampling.of(states), k)
    assert torch.equal(frontier[0][:, 0], ranked[0])
    assert torch.equal(frontier[1][:, 0], ranked[1])
    for b in range(rows):
        one = slice(b, b + 1)
        alone = sample(
            logits[one], Draft(tokens[one], parents[one]), reach[one], position[one], Sampling.of(states[one])
        )
        assert torch.equal(alone, drawn[one])
        for together, single in zip(
            ranked, rank(logits[one, 0], position[one], Sampling.of(states[one]), k), strict=True
        ):
            assert torch.equal(together[one], single)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"min_p": 0.01}, {"top_p": 0.7, "min_p": 0.05}], ids=str)
def test_candidates_alone_give_the_draw_of_the_whole_vocabulary(dtype: torch.dtype, options: dict[str, float]) -> None:
    """A large vocabulary with many ties in bfloat16; the unrestricted neighbour forces the full computation."""
    size, nodes = 5003, 8
    logits = (torch.randn(1, nodes, size, generator=torch.Generator().manual_seed(3)) * 2).to(dtype)
    parents = chain_parents(1, nodes)
    for k in (1, 50, 1000):
        states = [
            RowSampling(SamplingParams(top_k=k, temperature=1.1, **options), 5, [1], size),
            RowSampling(SamplingParams(), 6, [1], size),
        ]
        alone, both = Sampling.of(states[:1]), Sampling.of(states)
        assert (alone.candidates, both.candidates) == (k, 0)
        draft, reach = Draft(torch.zeros_like(parents), parents), ancestors(parents)
        twice = Draft(*(part.expand(2, nodes) for part in draft))
        for position in range(10, 1000, 300):
            at = torch.tensor([position])
            wide = sample(logits.expand(2, -1, -1), twice, reach.expand(2, -1, -1), at.expand(2), both)
            assert torch.equal(sample(logits, draft, reach, at, alone)[0], wide[0])


def test_a_neighbour_with_top_p_costs_no_row_its_tail() -> None:
    """A token too improbable to have an integer mass still belongs to a row that truncates nothing."""
    logits = torch.zeros(2, V)
    logits[:, 4] = -60.0
    states = [row(SamplingParams()), row(SamplingParams(top_p=0.5))]
    alone = rank(logits[:1], torch.tensor([3]), Sampling.of(states[:1]), V)
    both = rank(logits, torch.tensor([3, 3]), Sampling.of(states), V)
    assert alone[1].isfinite().all()
    assert torch.equal(both[0][:1], alone[0])
    assert torch.equal(both[1][:1], alone[1])
    assert both[1][1].isfinite().sum() == V // 2


def test_a_perfect_drafter_proposes_what_the_target_draws() -> None:
    generator = torch.Generator().manual_seed(0)
    for seed in range(60):
        options = {**EVERYTHING, "temperature": [0.0, 0.7, 1.0][seed % 3]} if seed % 2 else {"temperature": 1.0}
        state = row(SamplingParams(**options), output=[4, 4, 9], seed=seed, ends=END, words=BAD_WORDS)
        logits = torch.randn(1, V, generator=generator) * 2
        tokens, scores = rank(logits, torch.tensor([6]), Sampling.of([state]), 3)
        assert tokens[0, 0] == draw_after([state], logits, [5])[0]
        assert (scores[:, 1:] <= scores[:, :-1]).all()


def test_rank_scores_are_log_softmax_of_the_perturbed_scores() -> None:
    logits = torch.randn(2, V, generator=torch.Generator().manual_seed(4))
    states = [row(SamplingParams(temperature=0.8), seed=3), row(SamplingParams(temperature=0))]
    tokens, scores = rank(logits, torch.tensor([11, 11]), Sampling.of(states), V)
    e = noise(torch.tensor([3]), torch.tensor([11]), torch.arange(V))[0]
    expected = torch.stack([(logits[0] / 0.8 - e.log()).log_softmax(-1), logits[1].log_softmax(-1)])
    torch.testing.assert_close(scores, expected.gather(1, tokens), rtol=1e-5, atol=1e-5)
    assert tokens.sort().values.tolist() == [list(range(V))] * 2


# --- trees --------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_node_draws_what_a_plain_row_with_its_path_draws(data: st.DataObject) -> None:
    nodes = data.draw(st.integers(1, 9))
    params = data.draw(params_of())
    prompt, output = (
        [0, *data.draw(st.lists(st.integers(0, 3), max_size=4))],
        data.draw(st.lists(st.integers(0, 3), max_size=4)),
    )
    parents = [-1] + [data.draw(st.integers(0, n - 1)) for n in range(1, nodes)]
    # Few different tokens, likely ones, so that bad words often end on a path, across its root and in the prompt.
    words = data.draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=9))
    tokens = data.draw(st.lists(st.integers(0, 3), min_size=nodes, max_size=nodes))
    padding = data.draw(st.integers(1, nodes))
    logits = torch.randn(1, nodes, V, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))) * 2
    logits[:, :, :4] += 4
    position = len(prompt) + len(output) - 1
    draft = Draft(torch.tensor([tokens]), torch.tensor([parents]))
    draft.tokens[:, padding:] = PADDING
    state = row(params, prompt, output, ends=END, words=words)
    drawn = sample(logits, draft, ancestors(draft.parents), torch.tensor([position]), Sampling.of([state]))
    for node in range(padding):
        path: list[int] = []
        at = node
        while at > 0:
            path.insert(0, tokens[at])
            at = parents[at]
        plain = row(params, prompt, output + path, ends=END, words=words)
        assert draw_after([plain], logits[:, node], [position + len(path)]).item() == drawn[0, node]


def test_bad_words_are_found_along_every_path() -> None:
    """Greedy over 0 > 1 > 2 shows which of 0 and 1 are banned; words and paths are made of 0 and 1."""
    rng = random.Random(5)
    binary = [[(number >> bit) & 1 for bit in range(size)] for size in (2, 3, 4, 5) for number in range(1 << size)]
    seen = set()
    for _ in range(60):
        words = rng.sample(binary, 8)
        context = [rng.randrange(2) for _ in range(rng.randint(1, 4))]
        parents = [-1] + [rng.randrange(max(0, n - 2), n) for n in range(1, 8)]
        tokens = [context[-1]] + [rng.randrange(2) for _ in range(7)]
        draft = Draft(torch.tensor([tokens]), torch.tensor([parents]))
        state = row(SamplingParams(temperature=0), context[:1], context[1:], words=words)
        logits = torch.arange(V, 0, -1.0).expand(1, 8, V)
        at = torch.tensor([len(context) - 1])
        drawn = sample(logits, draft, ancestors(draft.parents), at, Sampling.of([state]))[0].tolist()
        for node in range(8):
            path: list[int] = []
            step = node
            while step > 0:
                path.insert(0, tokens[step])
                step = parents[step]
            whole = context + path
            banned = {word[-1] for word in words if whole[-len(word) + 1 :] == word[:-1]}
            assert drawn[node] == min({0, 1, 2} - banned)
            seen.add(drawn[node])
    assert seen == {0, 1, 2}


class RandomModel:
    """Logits as a fixed random function of the last three tokens."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.memory: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, context: Sequence[int]) -> Tensor:
        key = tuple(context[-3:])
        if key not in self.memory:
            number = self.seed
            for token in key:
                number = number * 31 + token + 1
            self.memory[key] = torch.randn(V, generator=torch.Generator().manual_seed(number)) * 2
        return self.memory[key]


def plain_decode(model: RandomModel, state: RowSampling, prompt: list[int], length: int) -> list[int]:
    context = list(prompt)
    while len(context) < len(prompt) + length:
        context.append(int(draw_after([state], model(context).unsqueeze(0), [len(context) - 1])))
        state.extend(context[-1:])
    return context[len(prompt) :]


def random_tree(rng: random.Random, context: Sequence[int], future: Sequence[int]) -> tuple[list[int], list[int]]:
    """Eight nodes: some continue the true future, some are wrong, some siblings repeat, some are padding."""
    tokens, parents, depths = [context[-1]], [-1], [0]
    for _ in range(7):
        parent = rng.randrange(len(tokens))
        depths.append(depths[parent] + 1)
        right = future[depths[-1] - 1] if depths[-1] <= len(future) else 0
        tokens.append(right if rng.random() < 0.7 else rng.randrange(V))
        parents.append(parent)
    real = rng.randint(1, 8)
    return tokens[:real] + [PADDING] * (8 - real), parents


def decode_with_trees(
    models: list[RandomModel],
    states: list[RowSampling],
    prompts: list[list[int]],
    expected: list[list[int]],
    rng: random.Random,
) -> tuple[list[list[int]], int]:
    """Decodes all rows together with random trees; returns what was emitted and how many guesses were accepted."""
    rows = range(len(states))
    outputs: list[list[int]] = [[] for _ in rows]
    accepted = 0
    while any(len(outputs[b]) < len(expected[b]) for b in rows):
        contexts = [prompts[b] + outputs[b] for b in rows]
        trees = [random_tree(rng, contexts[b], expected[b][len(outputs[b]) :]) for b in rows]
        draft = Draft(torch.tensor([t for t, _ in trees]), torch.tensor([p for _, p in trees]))
        reach = ancestors(draft.parents)
        nodes = draft.tokens.shape[1]

        def path(b: int, n: int, draft: Draft = draft, reach: Tensor = reach) -> list[int]:
            return [int(draft.tokens[b, m]) for m in range(1, n + 1) if reach[b, n, m]]

        logits = torch.stack([models[b](contexts[b] + path(b, n)) for b in rows for n in range(nodes)])
        position = torch.tensor([len(context) - 1 for context in contexts])
        drawn = sample(logits.view(len(rows), nodes, V), draft, reach, position, Sampling.of(states))
        verdict = verify(draft, reach, drawn)
        for b in rows:
            emitted = [*path(b, int(verdict.path[b, -1])), int(verdict.bonus[b])]
            states[b].extend(emitted)
            outputs[b] += emitted
            accepted += int(verdict.length[b])
    return outputs, accepted


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_no_tree_changes_the_output(temperature: float) -> None:
    """Three requests with different processors, decoded plainly one by one, then together with random trees."""
    options: list[dict[str, Any]] = [EVERYTHING, {"top_p": 0.9, "frequency_penalty": 0.5}, {}]
    prompts = [[1, 2, 3, 4], [5], [6, 0, 1]]
    length, total = 24, 0
    for seed in range(4):
        models = [RandomModel(1000 * seed + b) for b in range(3)]

        def fresh(seed: int = seed) -> list[RowSampling]:
            return [
                row(SamplingParams(temperature=temperature, **each), prompt, seed=seed, ends=END, words=BAD_WORDS)
                for each, prompt in zip(options, prompts, strict=True)
            ]

        expected = [plain_decode(m, s, p, length) for m, s, p in zip(models, fresh(), prompts, strict=True)]
        outputs, accepted = decode_with_trees(models, fresh(), prompts, expected, random.Random(seed))
        assert [output[:length] for output in outputs] == expected
        total += accepted
    assert total > 4 * length  # of 4 x 3 x 24 tokens; the trees were not vacuous


def test_padding_and_foreign_tokens_poison_nothing() -> None:
    """Tokens below 0 or beyond the vocabulary may stand in a draft; the nodes beside them draw as without them."""
    params = SamplingParams(**EVERYTHING)
    logits = torch.randn(1, 4, V, generator=torch.Generator().manual_seed(2))
    parents = torch.tensor([[-1, 0, 0, 1]])
    draws = []
    for other in (PADDING, V, 10**6, 5):
        sampling = Sampling.of([row(params, output=[4], ends=END, words=BAD_WORDS)])
        draft = Draft(torch.tensor([[4, 6, other, 2]]), parents)
        draws.append(sample(logits, draft, ancestors(parents), torch.tensor([2]), sampling)[0, [0, 1, 3]].tolist())
    assert all(each == draws[0] for each in draws)


# --- state --------------------------------------------------------------------------------------------------------


def test_nothing_is_carried_for_what_nobody_asks() -> None:
    plain = Sampling.of([row(SamplingParams()), row(SamplingParams(temperature=0.5))])
    assert plain.reusable
    assert not plain.greedy
    assert (plain.truncation, plain.bias, plain.ends, plain.words, plain.penalties, plain.loudness) == (None,) * 6
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


# --- log-probabilities --------------------------------------------------------------------------------------------


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
