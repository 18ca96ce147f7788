"""A row's draws depend on nothing but itself: not on its neighbours, the tree it is in, or the drafter."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sametoken.options.sampling import SamplingParams
from sametoken.speculation.draft import PADDING, Draft, ancestors, chain_parents
from sametoken.speculation.noise import noise
from sametoken.speculation.sampling import RowSampling, Sampling, rank, sample
from sametoken.speculation.verify import verify
from sampling_checks import BAD_WORDS, END, EVERYTHING, V, draw_after, params_of, row, tokens_of


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
    ancestor_mask, position = ancestors(parents), torch.randint(2, 12, (rows,), generator=generator)
    k = data.draw(st.integers(1, V))
    drawn = sample(logits, Draft(tokens, parents), ancestor_mask, position, Sampling.of(states))
    ranked = rank(logits[:, 0], position, Sampling.of(states), k)
    frontier = rank(logits, position, Sampling.of(states), k)
    assert torch.equal(frontier[0][:, 0], ranked[0])
    assert torch.equal(frontier[1][:, 0], ranked[1])
    for b in range(rows):
        one = slice(b, b + 1)
        alone = sample(
            logits[one], Draft(tokens[one], parents[one]), ancestor_mask[one], position[one], Sampling.of(states[one])
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
        draft, ancestor_mask = Draft(torch.zeros_like(parents), parents), ancestors(parents)
        twice = Draft(*(part.expand(2, nodes) for part in draft))
        for position in range(10, 1000, 300):
            at = torch.tensor([position])
            wide = sample(logits.expand(2, -1, -1), twice, ancestor_mask.expand(2, -1, -1), at.expand(2), both)
            assert torch.equal(sample(logits, draft, ancestor_mask, at, alone)[0], wide[0])


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
        ancestor_mask = ancestors(draft.parents)
        nodes = draft.tokens.shape[1]

        def path(b: int, n: int, draft: Draft = draft, ancestor_mask: Tensor = ancestor_mask) -> list[int]:
            return [int(draft.tokens[b, m]) for m in range(1, n + 1) if ancestor_mask[b, n, m]]

        logits = torch.stack([models[b](contexts[b] + path(b, n)) for b in rows for n in range(nodes)])
        position = torch.tensor([len(context) - 1 for context in contexts])
        drawn = sample(logits.view(len(rows), nodes, V), draft, ancestor_mask, position, Sampling.of(states))
        verdict = verify(draft, ancestor_mask, drawn)
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
