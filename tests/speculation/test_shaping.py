"""llama.cpp's samplers: the distribution is that of its formulas, and a draft changes no draw."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from sametoken import SamplingParams
from sametoken.options.shaping import Shaping
from sametoken.speculation.draft import Draft, ancestors, chain_parents
from sametoken.speculation.processors import gaps
from sametoken.speculation.rows import RowSampling, Sampling
from sametoken.speculation.sampling import sample
from sametoken.speculation.shaping import PathHistory, RowShapes, shaped, within_sigma

VOCABULARY = 40


def scores_of(seed: int) -> list[float]:
    chance = random.Random(seed)
    return [chance.gauss(0, 2.5) for _ in range(VOCABULARY)]


def softmax(scores: dict[int, float]) -> dict[int, float]:
    best = max(scores.values())
    raised = {token: math.exp(score - best) for token, score in scores.items()}
    return {token: each / sum(raised.values()) for token, each in raised.items()}


def top_n_sigma(scores: dict[int, float], n: float) -> dict[int, float]:
    mean = sum(scores.values()) / len(scores)
    deviation = math.sqrt(sum((score - mean) ** 2 for score in scores.values()) / len(scores))
    return {token: score for token, score in scores.items() if score >= max(scores.values()) - n * deviation}


def typical(scores: dict[int, float], most: float) -> dict[int, float]:
    chances = softmax(scores)
    entropy = -sum(p * math.log(p) for p in chances.values())
    kept: dict[int, float] = {}
    for token in sorted(chances, key=lambda token: abs(-math.log(chances[token]) - entropy)):
        kept[token] = scores[token]
        if sum(chances[each] for each in kept) > most:
            break
    return kept


def xtc(scores: dict[int, float], threshold: float) -> dict[int, float]:
    chances = softmax(scores)
    above = sorted((token for token in chances if chances[token] >= threshold), key=lambda token: -chances[token])
    return {token: score for token, score in scores.items() if token not in above[:-1]}


def dynatemp(scores: dict[int, float], temperature: float, spread: float, exponent: float) -> dict[int, float]:
    chances = softmax(scores)
    entropy = -sum(p * math.log(p) for p in chances.values() if p > 0) / math.log(max(2, len(scores)))
    least, most = max(0.0, temperature - spread), temperature + spread
    return {token: score / (least + (most - least) * entropy**exponent) for token, score in scores.items()}


def plain(scores: dict[int, float]) -> dict[int, float]:
    return {token: score / 0.8 for token, score in scores.items()}


FORMULAS: list[tuple[dict[str, float], Callable[[dict[int, float]], dict[int, float]]]] = [
    ({"top_n_sigma": 1.0}, lambda scores: plain(top_n_sigma(scores, 1.0))),
    ({"typical_p": 0.5}, lambda scores: plain(typical(scores, 0.5))),
    ({"xtc_probability": 1.0, "xtc_threshold": 0.08}, lambda scores: plain(xtc(scores, 0.08))),
    ({"dynatemp_range": 0.5, "dynatemp_exponent": 1.5}, lambda scores: dynatemp(scores, 0.8, 0.5, 1.5)),
    ({"top_n_sigma": 1.5, "typical_p": 0.7, "dynatemp_range": 0.2},
     lambda scores: dynatemp(typical(top_n_sigma(scores, 1.5), 0.7), 0.8, 0.2, 1.0)),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "formula"), FORMULAS, ids=[" ".join(asked) for asked, _ in FORMULAS])
@pytest.mark.parametrize("seed", range(8))
def test_the_distribution_is_llama_cpps(
    asked: dict[str, float], formula: Callable[[dict[int, float]], dict[int, float]], seed: int
) -> None:
    scores = scores_of(seed)
    shape = RowShapes.of([(0, 0.8, Shaping(**asked))], torch.device("cpu"))  # type: ignore[arg-type]
    gap = gaps(torch.tensor(scores).view(1, 1, -1))
    cost = shaped(within_sigma(gap, gap, shape), shape, torch.tensor([[7]]), torch.tensor([5]))
    found = torch.softmax(-cost[0, 0].double(), -1).tolist()
    wanted = softmax(formula(dict(enumerate(scores))))
    for token, chance in enumerate(found):
        assert chance == pytest.approx(wanted.get(token, 0.0), abs=2e-4)


def test_xtc_applies_as_often_as_asked() -> None:
    scores = torch.tensor([2.0, 1.9, 1.8, -3.0]).view(1, 1, 4).expand(1, 2000, 4)
    shape = RowShapes.of([(0, 1.0, Shaping(xtc_probability=0.3, xtc_threshold=0.1))], torch.device("cpu"))
    gap = gaps(scores)
    cost = shaped(gap, shape, torch.arange(2000).view(1, -1), torch.tensor([9]))
    assert 0.25 < (cost[0, :, 0] == torch.inf).float().mean().item() < 0.35
    assert bool((cost[0, :, 2] < torch.inf).all())


def penalties_of(text: Sequence[int], asked: Shaping, breakers: frozenset[int]) -> dict[int, float]:
    """DRY by its definition: every earlier end of the text's own end, in quadratic time."""
    size = len(text) if asked.dry_penalty_last_n == -1 else min(len(text), asked.dry_penalty_last_n)
    window = list(text[len(text) - size :])
    longest = next((back for back, token in enumerate(reversed(window)) if token in breakers), size)
    most: dict[int, int] = {}
    for end in range(size - 1):
        length = 0
        while length <= end and window[end - length] == window[-1 - length]:
            length += 1
        if min(length, longest) >= asked.dry_allowed_length and window[end + 1] not in breakers:
            most[window[end + 1]] = max(most.get(window[end + 1], 0), min(length, longest))
    if longest < asked.dry_allowed_length or size <= asked.dry_allowed_length:
        return {}
    return {
        token: asked.dry_multiplier * asked.dry_base ** (length - asked.dry_allowed_length)
        for token, length in most.items()
    }


@pytest.mark.parametrize("seed", range(20))
def test_dry_counts_repeats_on_each_path(seed: int) -> None:
    chance = random.Random(seed)
    text = [chance.randrange(3) for _ in range(chance.randrange(1, 40))]
    asked = Shaping(
        dry_multiplier=0.8, dry_allowed_length=chance.randrange(0, 4), dry_penalty_last_n=chance.choice([-1, 5, 17])
    )
    breakers = frozenset({2}) if seed % 3 == 0 else frozenset()
    history = PathHistory(asked, (1.0, 0.0, 0.0), breakers, text[:1])
    history.extend(text[1:])
    tokens, parents = [text[-1], 0, 1, 0, 1], [-1, 0, 1, 1, 0]
    scores = torch.zeros(5, 5)
    history.edit(scores, tokens, parents)
    for node, path in enumerate(([], [0], [0, 1], [0, 0], [1])):
        wanted = penalties_of([*text, *path], asked, breakers)
        for token in range(5):
            assert scores[node, token].item() == pytest.approx(-wanted.get(token, 0.0), rel=1e-5)


def test_penalties_count_a_window() -> None:
    history = PathHistory(Shaping(repeat_last_n=3), (2.0, 0.5, 0.25), frozenset(), [0, 1, 2, 2])
    scores = torch.tensor([[4.0, 4.0, -4.0, 4.0]] * 2)
    history.edit(scores, [2, 3], [-1, 0])
    assert scores.tolist() == [[4.0, 1.25, -9.0, 4.0], [4.0, 4.0, -9.0, 1.25]]


ASKED = SamplingParams(
    temperature=0.9,
    top_k=20,
    repetition_penalty=1.2,
    shaping=Shaping(
        top_n_sigma=2.0, typical_p=0.9, xtc_probability=0.5, xtc_threshold=0.05, dynatemp_range=0.3, repeat_last_n=8,
        dry_multiplier=0.8, dry_allowed_length=1,
    ),
)  # fmt: skip


def model(text: Sequence[int]) -> Tensor:
    """Scores after a text."""
    return torch.tensor(scores_of(sum(text[-3:]) + 31 * len(text)))


def drawn(text: list[int], guesses: list[int], others: int) -> list[int]:
    """The draws after each node of a chain of guesses, in a batch with other rows."""
    chain = [text[-1], *guesses]
    rows = [RowSampling(ASKED, 3, text, VOCABULARY)]
    rows += [RowSampling(SamplingParams(temperature=0.5), each, text, VOCABULARY) for each in range(others)]
    logits = torch.stack([model([*text, *guesses[:node]]) for node in range(len(chain))])
    batch = len(rows)
    draft = Draft(torch.tensor([chain] * batch), chain_parents(batch, len(chain)))
    position = torch.full((batch,), len(text) - 1)
    tokens = sample(logits.expand(batch, -1, -1), draft, ancestors(draft.parents), position, Sampling.of(rows))
    return list(map(int, tokens[0]))


def test_a_draft_and_a_batch_change_no_draw() -> None:
    text, told = [1, 2, 3, 1, 2, 3], list[int]()
    for _ in range(12):
        told.append(drawn([*text, *told], [], 0)[0])
    for begin in range(0, 12, 4):
        so_far = [*text, *told[:begin]]
        guesses = told[begin : begin + 3]
        assert drawn(so_far, guesses, 2) == told[begin : begin + 4]
