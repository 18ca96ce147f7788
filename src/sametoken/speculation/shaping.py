"""Samplers of llama.cpp. Legend: S shaped rows, N nodes, V tokens.

Top-n-sigma, typical, XTC and dynamic temperature are functions of a node's scores and of its position's noise alone, so
that no draft changes a draw. Sums over the vocabulary are taken in integers: they do not depend on order, batch or
kernel. Penalties over a window and DRY read the newest tokens of the node's own path on the host: the row's history and
the draft tokens above the node.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sametoken.options.shaping import WHOLE, Shaping
from sametoken.speculation.draft import Draft
from sametoken.speculation.noise import uniform
from sametoken.speculation.processors import beyond, mass

MOST_LOG = 88.7228391  # logarithm of the greatest float32, at which llama.cpp caps the exponent
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


class PathHistory:
    """Tokens of a row, with the length of the repetition that ends at each of them (for DRY).

    Args:
        shaping: llama.cpp samplers of the request.
        penalties: repetition, presence and frequency penalty.
        breakers: ids of tokens at which a repetition ends.
        tokens: prompt.
    """

    def __init__(
        self, shaping: Shaping, penalties: tuple[float, float, float], breakers: frozenset[int], tokens: Sequence[int]
    ) -> None:
        self._shaping, self._penalties, self._breakers = shaping, penalties, breakers
        self._tokens = torch.tensor(tokens, dtype=torch.int64)
        self._runs = _repeats(tokens) if shaping.dry else torch.zeros(len(tokens), dtype=torch.int64)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append emitted tokens, in order."""
        for token in tokens:
            self._tokens, self._runs = self._after(self._tokens, self._runs, token)

    def edit(self, scores: Tensor, tokens: Sequence[int], parents: Sequence[int]) -> None:
        """Change the logits `scores` [N, V] of the row's nodes in place.

        Args:
            tokens, parents: [N], or [1] to edit all N rows alike; node 0 is in the history already.
        """
        known = {0: (self._tokens, self._runs)}
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if node:
                known[node] = self._after(*known[max(0, parent)], token)
            own = scores if len(tokens) == 1 else scores[node : node + 1]
            self._penalise(own, known[node][0])
            for named, penalty in self._repeated(*known[node]):
                if named < own.shape[1]:
                    own[:, named] -= penalty

    def _after(self, text: Tensor, runs: Tensor, token: int) -> tuple[Tensor, Tensor]:
        """Tokens and repetition lengths after appending `token`."""
        if self._shaping.dry:
            before = torch.nn.functional.pad(runs[:-1], (1, 0))[: len(runs)]
            runs = torch.where(text == token, before + 1, 0)
        longer = torch.cat((text, text.new_tensor([token])))
        return longer, torch.cat((runs, runs.new_tensor([len(longer)])))

    def _penalise(self, scores: Tensor, text: Tensor) -> None:
        size, (repetition, presence, frequency) = self._shaping.repeat_last_n, self._penalties
        if not size or (repetition, presence, frequency) == (1.0, 0.0, 0.0):
            return
        newest = text if size == WHOLE else text[-size:]
        counts = torch.bincount(newest[(newest >= 0) & (newest < scores.shape[1])])
        ids = counts.nonzero().flatten()
        where, times = ids.to(scores.device), counts[ids].to(scores.device, torch.float32)
        own = scores[:, where]
        own = torch.where(own > 0, own / repetition, own * repetition) - times * frequency - presence
        scores[:, where] = own

    def _repeated(self, text: Tensor, runs: Tensor) -> Iterator[tuple[int, float]]:
        """Yield each token that would extend a repetition, with its DRY penalty."""
        asked = self._shaping
        if not asked.dry:
            return
        size = len(text) if asked.dry_penalty_last_n == WHOLE else min(len(text), asked.dry_penalty_last_n)
        begin, longest = len(text) - size, size
        for back, token in enumerate(text[begin:].flip(0).tolist()):
            if token in self._breakers:
                longest = back
                break
        if size <= asked.dry_allowed_length or longest < asked.dry_allowed_length:
            return
        at = torch.arange(begin, len(text) - 1)
        length = runs[begin:-1].minimum(at - begin + 1).clamp(max=longest)
        enough = length >= asked.dry_allowed_length
        most: dict[int, int] = {}
        for token, repeat in zip(text[at[enough] + 1].tolist(), length[enough].tolist(), strict=True):
            most[token] = max(repeat, most.get(token, 0))
        limit = int(MOST_LOG / math.log(asked.dry_base)) if asked.dry_base > 1.000001 else 0
        for token, repeat in most.items():
            if token not in self._breakers and token >= 0:
                exponent = repeat - asked.dry_allowed_length
                yield token, asked.dry_multiplier * asked.dry_base ** (min(exponent, limit) if limit else exponent)


def edit(scores: Tensor, draft: Draft, histories: Sequence[PathHistory | None]) -> None:
    """Edit in place the logits `scores` [B, N, V] of the rows that have a history."""
    for row, history in enumerate(histories):
        if history is not None:
            history.edit(scores[row], draft.tokens[row].tolist(), draft.parents[row].tolist())


def _repeats(tokens: Sequence[int]) -> Tensor:
    """Length, for each token, of the longest end of the text that also ends at that token; Z-algorithm from the end."""
    text, size = list(reversed(tokens)), len(tokens)
    found, left, right = [0] * size, 0, 0
    for place in range(1, size):
        length = min(right - place, found[place - left]) if place < right else 0
        while place + length < size and text[length] == text[place + length]:
            length += 1
        if place + length > right:
            left, right = place, place + length
        found[place] = length
    if size:
        found[0] = size
    return torch.tensor(found[::-1], dtype=torch.int64)
