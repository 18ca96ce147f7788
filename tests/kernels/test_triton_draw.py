"""The Triton draw in Triton's interpreter: the hash bit for bit, the draws token for token, ties to the lowest."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed: run `make test-triton`")

import triton
import triton.language as tl

from sametoken.kernels.triton.draw import SPLIT, _hash, draw
from sametoken.options.sampling import SamplingParams
from sametoken.speculation import noise as reference
from sametoken.speculation.draft import PADDING, Draft, ancestors
from sametoken.speculation.sampling import RowSampling, Sampling, sample

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def _hash_of(seed, position, out, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    tokens = tl.arange(0, COUNT)
    one = tl.arange(0, 1)
    tl.store(out + tokens, _hash(tl.load(seed + one), tl.load(position + one), tokens))


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63), 123456789])
@pytest.mark.parametrize("position", [0, 1, 77, 2**40])
def test_the_hash_is_the_hash(seed: int, position: int) -> None:
    at = [torch.tensor([value], device=DEVICE) for value in (seed, position)]
    found = torch.empty(256, dtype=torch.int32, device=DEVICE)
    _hash_of[(1,)](*at, found, 256)
    assert torch.equal(found, reference._hash(*at, torch.arange(256, device=DEVICE))[0])


def drawn(scores: Tensor, positions: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """By the kernel and by `sample`; the nodes are a chain."""
    batch, nodes = scores.shape[:2]
    parents = torch.arange(-1, nodes - 1, device=DEVICE).expand(batch, -1)
    draft = Draft(torch.zeros_like(parents), parents)
    at = positions.unsqueeze(1) + torch.arange(1, nodes + 1, device=DEVICE)
    kernel = draw(scores, at, sampling.seed, sampling.temperature, sampling.noise_scale)
    columns = {name: getattr(sampling, name) for name in ("seed", "temperature", "noise_scale")}
    sampling = replace(sampling, **{name: x.cpu() if x is not None else None for name, x in columns.items()})
    draft, ancestor_mask = Draft(draft.tokens.cpu(), draft.parents.cpu()), ancestors(parents.cpu())
    return kernel.cpu(), sample(scores.cpu(), draft, ancestor_mask, positions.cpu(), sampling)


@pytest.mark.parametrize("temperatures", [(0.0, 0.0), (1.0, 1.0), (0.7, 1.3), (0.0, 0.8)])
@pytest.mark.parametrize(("vocabulary", "dtype"), [(97, torch.float32), (SPLIT + 1500, torch.float16)])
def test_draws_are_those_of_sample(temperatures: tuple[float, ...], vocabulary: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    nodes = 10 if vocabulary < SPLIT else 3
    scores = (3 * torch.randn(2, nodes, vocabulary, generator=generator)).to(dtype).to(DEVICE)
    scores[1, 0, 5:90] = float("-inf")
    rows = [
        RowSampling(SamplingParams(temperature=t), 17 + i, [1], vocabulary, device=DEVICE)
        for i, t in enumerate(temperatures)
    ]
    sampling = Sampling.of(rows)
    kernel, ours = drawn(scores, torch.tensor([3, 1000], device=DEVICE), sampling)
    assert torch.equal(kernel, ours)
    assert kernel.unique().numel() > nodes // 2  # not one token for all


def test_equals_go_to_the_lowest_token() -> None:
    scores = torch.zeros(1, 2, SPLIT + 40, device=DEVICE)
    scores[0, 0, [4, 9, SPLIT + 3]] = 2.0
    scores[0, 1, [1100, SPLIT + 3]] = 2.0
    at = torch.tensor([[1, 2]], device=DEVICE)
    assert draw(scores, at, None, None, None).tolist() == [[4, 1100]]
    assert draw(torch.full_like(scores, float("-inf")), at, None, None, None).tolist() == [[PADDING, PADDING]]
