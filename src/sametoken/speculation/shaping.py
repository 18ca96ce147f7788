"""Samplers of llama.cpp that read the whole distribution: top-n-sigma, typical, XTC and dynamic temperature.

Each is a function of a node's scores and of its position's noise alone, so that no draft changes a draw. Sums over the
vocabulary are taken in integers: they do not depend on order, batch or kernel. S shaped rows, N nodes, V tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sametoken.options.shaping import Shaping
from sametoken.speculation.noise import uniform
from sametoken.speculation.processors import beyond, mass

_SCORE = 2.0**12  # integer steps of a score; the greatest gap that counts has 22 bits, its square 44
_MOST_GAP = 2.0**10
_SHARE, _BITS = 2**20, 2.0**16  # integer steps of a probability of 1, and of its logarithm
_WHOLE = 2**63 - 1


class RowShapes(NamedTuple):
    """Parameters of the S shaped rows. All but `rows` are [S, 1, 1].

    Attributes:
        rows: [S] int64.
        temperature: float32, of the last step.
        sigma: float32, top-n-sigma; infinite if off.
        typical: float64, typical-p; 1 if off.
        chance: float32, probability of XTC.
        threshold: float64, threshold of XTC.
        spread: float32, range of the dynamic temperature.
        exponent: float32, exponent of the dynamic temperature.
    """

    rows: Tensor
    temperature: Tensor
    sigma: Tensor
    typical: Tensor
    chance: Tensor
    threshold: Tensor
    spread: Tensor
    exponent: Tensor

    @classmethod
    def of(cls, asked: Sequence[tuple[int, float, Shaping]], device: torch.device) -> RowShapes:
        """Parameters of (row, temperature, samplers) triples."""
        _, temperatures, shapings = zip(*asked, strict=True)

        def column(values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device).view(-1, 1, 1)

        return cls(
            torch.tensor([row for row, _, _ in asked], device=device),
            column(temperatures),
            column([each.top_n_sigma if each.top_n_sigma > 0 else torch.inf for each in shapings]),
            column([each.typical_p for each in shapings], torch.float64),
            column([each.xtc_probability for each in shapings]),
            column([each.xtc_threshold for each in shapings], torch.float64),
            column([each.dynatemp_range for each in shapings]),
            column([each.dynatemp_exponent for each in shapings]),
        )


def within_sigma(gap: Tensor, cost: Tensor, shape: RowShapes) -> Tensor:
    """Copy of `cost` [B, N, V] with infinity for tokens too many standard deviations below the best (top-n-sigma).

    Args:
        gap: [B, N, V] from `processors.gaps`.
    """
    own = gap[shape.rows]
    there = own < torch.inf
    steps = (own.clamp(max=_MOST_GAP) * _SCORE).to(torch.int64).mul_(there)
    count = there.sum(-1, keepdim=True).clamp_(min=1).to(torch.float64)
    mean = steps.sum(-1, keepdim=True).to(torch.float64) / count
    square = (steps * steps).sum(-1, keepdim=True).to(torch.float64) / count
    deviation = ((square - mean * mean).clamp_(min=0).sqrt_() / _SCORE).to(torch.float32)
    far = own > shape.sigma * deviation  # a row without top-n-sigma: infinity, or NaN where all logits are equal
    return cost.index_put((shape.rows,), cost[shape.rows].masked_fill(far, torch.inf))


def shaped(cost: Tensor, shape: RowShapes, at: Tensor, seed: Tensor) -> Tensor:
    """Copy of `cost` [B, N, V] after typical-p, XTC and the temperature of shaped rows, which `cost` does not include.

    Args:
        at: [B, N] positions of the draws.
        seed: [B] seeds of the rows.
    """
    own = _typical(cost[shape.rows], shape)
    seeds = seed[shape.rows].unsqueeze(1).expand(own.shape[:2]).reshape(-1)
    places = at[shape.rows].expand(own.shape[:2]).reshape(-1)
    nobody = torch.tensor([cost.shape[-1]], device=cost.device)  # a key that no token has
    variate = uniform(seeds, places, nobody).view(*own.shape[:2], 1)
    own = _without_top(own, shape, variate)
    return cost.index_put((shape.rows,), own / _temperature(own, shape))


def _typical(cost: Tensor, shape: RowShapes) -> Tensor:
    """Keep the tokens nearest to the entropy until their mass exceeds the requested one."""
    masses = mass(cost)
    total = masses.sum(-1, keepdim=True)
    information, entropy = _entropy(cost, masses, total)
    distance = (information - entropy).abs_().masked_fill_(masses == 0, torch.inf)
    wanted = (total.to(torch.float64) * shape.typical).floor().to(torch.int64) + 1
    dropped = beyond(distance, masses, wanted.masked_fill(shape.typical >= 1, _WHOLE), ordered=False)
    return cost.masked_fill(dropped & (shape.typical < 1), torch.inf)


def _without_top(cost: Tensor, shape: RowShapes, variate: Tensor) -> Tensor:
    """Apply XTC where `variate` [S, N, 1] is below its chance: of tokens above the threshold, keep the least likely."""
    masses = mass(cost)
    least = (masses.sum(-1, keepdim=True).to(torch.float64) * shape.threshold).ceil().to(torch.int64).clamp_(min=1)
    above = masses >= least
    greatest = cost.masked_fill(~above, -torch.inf).amax(-1, keepdim=True)
    ids = torch.arange(cost.shape[-1], device=cost.device)
    kept = ids.expand_as(cost).masked_fill(~(above & (cost == greatest)), -1).amax(-1, keepdim=True)
    return cost.masked_fill(above & (ids != kept) & (variate < shape.chance), torch.inf)


def _temperature(cost: Tensor, shape: RowShapes) -> Tensor:
    """Temperature [S, N, 1] of each node."""
    masses = mass(cost)
    _, entropy = _entropy(cost, masses, masses.sum(-1, keepdim=True))
    choices = (cost < torch.inf).sum(-1, keepdim=True).clamp_(min=2).to(torch.float32)
    unsure = (entropy / choices.log()).clamp_(0, 1)
    least, most = (shape.temperature - shape.spread).clamp(min=0), shape.temperature + shape.spread
    moved = least + (most - least) * unsure.pow(shape.exponent)
    return torch.where(shape.spread > 0, moved, shape.temperature).clamp_(min=1e-30)


def _entropy(cost: Tensor, masses: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Values -log p [S, N, V] of every token, and their expectation [S, N, 1]."""
    information = cost + (total.to(torch.float64) / 2.0**40).log_().to(torch.float32)
    share = (masses.to(torch.float64) / total * _SHARE).to(torch.int64)
    bits = (information.clamp(0, 64) * _BITS).to(torch.int64)
    weight = share.sum(-1, keepdim=True).clamp_(min=1).to(torch.float64)
    return information, ((share * bits).sum(-1, keepdim=True).to(torch.float64) / weight / _BITS).to(torch.float32)
