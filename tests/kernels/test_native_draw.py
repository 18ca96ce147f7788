"""The compiled kernels draw the very tokens that torch draws, or leave the draw to it."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from native_checks import kernels, threads
from sametoken.kernels.cpu.library import Library
from sametoken.kernels.cpu.structures import address
from sametoken.options.sampling import SamplingParams
from sametoken.runtime.draw import draw, draw_of
from sametoken.speculation.draft import PADDING, Draft, chain_mask, chain_parents
from sametoken.speculation.sampling import RowSampling, Sampling, sample

SCORES = {"usual": 3.0, "nearly equal": 0.01, "many equal": 2.0, "one far ahead": 8.0}
__all__ = ["kernels", "threads"]  # fixtures

pytestmark = pytest.mark.parametrize("threads", [1], indirect=True)


def any_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0, 1e-6, 0.3, 0.8, 1, 2.5]),
        top_p=rng.choice([1, 1, 0.95, 0.5, 1e-9]),
        top_k=rng.choice([-1, -1, 1, 5, 50]),
        min_p=rng.choice([0, 0, 0.05]),
    )


def chains(logits: Tensor, positions: Tensor) -> tuple[Tensor, Draft, Tensor, Tensor]:
    """The arguments of a draw after chains, which need no sampling."""
    rows, nodes, _ = logits.shape
    draft = Draft(torch.zeros(rows, nodes, dtype=torch.int64), chain_parents(rows, nodes))
    return logits, draft, chain_mask(rows, nodes), positions


def compiled(kernels: Library, logits: Tensor, positions: Tensor, sampling: Sampling) -> Tensor:
    at = positions.unsqueeze(1) + torch.arange(1, 1 + logits.shape[1])
    return kernels.sample(draw_of(sampling, address(at)), logits)


@pytest.mark.parametrize("kind", SCORES)
def test_draws_are_those_of_torch(kernels: Library, kind: str) -> None:
    rng, generator = random.Random(kind), torch.Generator().manual_seed(1)
    drawn = unsure = 0
    for vocabulary in [17, 300, 1000, 4099] * 12:
        rows, nodes = rng.choice([1, 3, 8]), rng.choice([1, 4])
        states = [RowSampling(any_params(rng), rng.getrandbits(60), [1, 2], vocabulary) for _ in range(rows)]
        logits = torch.randn(rows, nodes, vocabulary, generator=generator) * SCORES[kind]
        if kind == "many equal":
            logits = logits.round()
        logits[:, :, :: rng.choice([2, 7, vocabulary])] = -torch.inf
        positions, sampling = torch.randint(0, 5000, (rows,), generator=generator), Sampling.of(states)
        expected = sample(*chains(logits, positions), sampling)
        assert torch.equal(draw(*chains(logits, positions), sampling), expected)
        found = compiled(kernels, logits, positions, sampling)
        left = found < 0
        assert torch.equal(found.masked_fill(left, 0), expected.masked_fill(left, 0))
        drawn, unsure = drawn + found.numel(), unsure + int(left.sum())
    assert unsure <= drawn / 100, "torch has to draw so much that the kernels hardly help"


def test_scores_that_are_no_numbers_are_left_to_torch(kernels: Library) -> None:
    sampling = Sampling.of([RowSampling(SamplingParams(temperature=t), 5, [1], 40) for t in (0, 1, 1, 0, 1)])
    logits = torch.randn(5, 1, 40, generator=torch.Generator().manual_seed(2))
    logits[0, 0, 7], logits[1, 0, 39], logits[2, 0, 3], logits[3] = torch.nan, torch.nan, torch.inf, -torch.inf
    positions = torch.arange(5)
    assert (compiled(kernels, logits, positions, sampling)[:4] == -2).all()
    found = draw(*chains(logits, positions), sampling)
    assert torch.equal(found, sample(*chains(logits, positions), sampling))
    assert found[0, 0] == found[3, 0] == PADDING


def test_a_draw_that_rounding_could_decide_is_left_to_torch(kernels: Library) -> None:
    """Two tokens whose cost and noise come to the same within a few units of the last place."""
    positions, state = torch.tensor([9]), RowSampling(SamplingParams(temperature=1), 3, [1], 2)
    sampling, unsure = Sampling.of([state]), 0
    even = _even(positions, sampling)
    for step in range(-40, 40):
        logits = torch.tensor([[[0.0, even + step * 2.0**-22]]])
        expected = sample(*chains(logits, positions), sampling)
        found = compiled(kernels, logits, positions, sampling)
        unsure += int(found[0, 0] < 0)
        assert found[0, 0] in (-2, expected[0, 0])
        assert torch.equal(draw(*chains(logits, positions), sampling), expected)
    assert unsure == 80


def _even(positions: Tensor, sampling: Sampling) -> float:
    """By how much the second of two tokens must score more than the first for an equal chance of the draw."""
    low, high = -40.0, 40.0
    for _ in range(60):
        middle = (low + high) / 2
        second = sample(*chains(torch.tensor([[[0.0, middle]]]), positions), sampling)[0, 0] == 1
        low, high = (low, middle) if second else (middle, high)
    return high
