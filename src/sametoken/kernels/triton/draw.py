"""Draws in three passes over the logits, in Triton: `sampling.sample` for rows without truncation.

A draw is the argmin of log E - log p; the noise E is hashed in registers, so nothing of vocabulary size is written.
Importing this module needs triton; with TRITON_INTERPRET=1 it runs on the CPU. Legend: R rows (nodes of all sequences),
V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from sametoken.speculation.draft import PADDING

BLOCK = 1024
SPLIT = 8 * BLOCK  # logits that one program reads
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)  # the constants of `noise`
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2 = tl.constexpr(0x94D049BB133111EB)
LOW_BIAS_1 = tl.constexpr(0x7FEB352D)
LOW_BIAS_2 = tl.constexpr(0x846CA68B)
BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def _mix(x):  # type: ignore[no-untyped-def]
    """The finaliser of splitmix64 over uint64."""
    x = (x ^ (x >> 30)) * MIX_1
    x = (x ^ (x >> 27)) * MIX_2
    return x ^ (x >> 31)


@triton.jit
def _hash(seed, position, tokens):  # type: ignore[no-untyped-def]
    """`noise._hash`: int32, from an int64 seed and position (blocks of one) and int32 tokens."""
    golden = tl.full([1], GOLDEN, tl.uint64)
    key = _mix(_mix(seed.to(tl.uint64, bitcast=True) + golden) + position.to(tl.uint64, bitcast=True) * golden)
    h = tokens.to(tl.uint32) ^ key.to(tl.uint32)
    h = (h ^ (h >> 16)) * LOW_BIAS_1
    h = h ^ (key >> 32).to(tl.uint32)
    h = (h ^ (h >> 15)) * LOW_BIAS_2
    h = h ^ (h >> 16)
    return h.to(tl.int32, bitcast=True)


@triton.jit
def _log_noise(h):  # type: ignore[no-untyped-def]
    """Compute log E of a hash in float32 with the functions that torch's own kernels call."""
    uniform = h.to(tl.float32) * 2.0**-32 + 2.0**-33
    uniform = tl.minimum(uniform - tl.floor(uniform), BELOW_ONE)
    if INTERPRETED:  # the interpreter has no libdevice; in float64 the plain logarithm is as good
        noise = -tl.log(1.0 - uniform.to(tl.float64))
        return tl.log(noise.to(tl.float32).to(tl.float64)).to(tl.float32)
    return libdevice.log(-libdevice.log1p(-uniform))


@triton.jit(do_not_specialize=["vocabulary", "splits"])  # type: ignore[untyped-decorator]
def _best(scores, bests, vocabulary, splits, BLOCK: tl.constexpr, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Find the greatest logit of one split of one row."""
    row, split = tl.program_id(0), tl.program_id(1)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for block in range(SPLIT // BLOCK):
        at = split * SPLIT + block * BLOCK + tl.arange(0, BLOCK)
        score = tl.load(scores + row.to(tl.int64) * vocabulary + at, mask=at < vocabulary, other=float("-inf"))
        score = score.to(tl.float32)
        best = tl.maximum(best, tl.where(score == score, score, float("inf")))  # NaN makes every cost infinite
    tl.store(bests + row * splits + split, tl.max(best, 0))


@triton.jit(do_not_specialize=["vocabulary", "splits", "nodes"])  # type: ignore[untyped-decorator]
def _race(  # type: ignore[no-untyped-def]
    scores, bests, seeds, positions, temperatures, noise_scale, costs, winners, vocabulary, splits, nodes,
    SPLITS: tl.constexpr, NOISY: tl.constexpr, TEMPERED: tl.constexpr, MIXED: tl.constexpr,
    BLOCK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Find the least cost of one split of one row, and the lowest token with this cost."""
    row, split = tl.program_id(0), tl.program_id(1)
    sequence = row // nodes
    every = tl.arange(0, SPLITS)
    best = tl.max(tl.load(bests + row * splits + every, mask=every < splits, other=float("-inf")), 0)
    best = tl.maximum(best, LOWEST)
    least = tl.full([BLOCK], float("inf"), tl.float32)
    winner = tl.full([BLOCK], 0, tl.int32) + vocabulary
    one = tl.arange(0, 1)
    for block in range(SPLIT // BLOCK):
        at = split * SPLIT + block * BLOCK + tl.arange(0, BLOCK)
        score = tl.load(scores + row.to(tl.int64) * vocabulary + at, mask=at < vocabulary, other=float("-inf"))
        cost = tl.abs(best - score.to(tl.float32))
        if TEMPERED:
            cost = tl.div_rn(cost, tl.full([BLOCK], 0.0, tl.float32) + tl.load(temperatures + sequence))
        if NOISY:
            log_noise = _log_noise(_hash(tl.load(seeds + sequence + one), tl.load(positions + row + one), at))
            if MIXED:
                log_noise = log_noise * tl.load(noise_scale + sequence)
            cost = log_noise + cost
        better = (at < vocabulary) & ((cost < least) | (winner == vocabulary))
        winner = tl.where(better, at, winner)  # earlier blocks have lower token ids: equal costs change nothing
        least = tl.where(better, cost, least)
    cost = tl.min(least, 0)
    tl.store(costs + row * splits + split, cost)
    tl.store(winners + row * splits + split, tl.min(tl.where(least == cost, winner, vocabulary), 0))


def draw(
    scores: Tensor, at: Tensor, seed: Tensor | None, temperature: Tensor | None, noise_scale: Tensor | None
) -> Tensor:
    """Token of least cost after each node, [B, N] int64, the lowest id among equals; `PADDING` for none.

    Args:
        scores: [B, N, V] processed logits of any floating type.
        at: [B, N] int64 position of each draw.
        seed, temperature, noise_scale: fields of `Sampling` for B rows.
    """
    token: Tensor = _operator(scores, at, seed, temperature, noise_scale)
    return token


@torch.library.custom_op("sametoken::draw", mutates_args=())
def _operator(
    scores: Tensor, at: Tensor, seed: Tensor | None, temperature: Tensor | None, noise_scale: Tensor | None
) -> Tensor:
    batch, nodes, vocabulary = scores.shape
    scores, rows, splits = scores.contiguous(), batch * nodes, -(-vocabulary // SPLIT)
    bests = scores.new_empty(rows, splits, dtype=torch.float32)
    costs, winners = torch.empty_like(bests), torch.empty_like(bests, dtype=torch.int32)
    # Fields that are None are not read; any tensor is passed in their place.
    columns = (x.contiguous() if x is not None else bests for x in (seed, at, temperature, noise_scale))
    with torch.cuda.device_of(scores):  # type: ignore[no-untyped-call]
        _best[(rows, splits)](scores, bests, vocabulary, splits, BLOCK=BLOCK, SPLIT=SPLIT, enable_fp_fusion=False)
        _race[(rows, splits)](
            scores, bests, *columns, costs, winners, vocabulary, splits, nodes,
            SPLITS=triton.next_power_of_2(splits), NOISY=seed is not None, TEMPERED=temperature is not None,
            MIXED=noise_scale is not None, BLOCK=BLOCK, SPLIT=SPLIT, enable_fp_fusion=False,
        )  # fmt: skip
    least = costs.amin(-1, keepdim=True)
    tokens = winners.masked_fill(costs > least, vocabulary).amin(-1).masked_fill(~least.squeeze(-1).isfinite(), PADDING)
    return tokens.view(batch, nodes).to(torch.int64)


@_operator.register_fake
def _(
    scores: Tensor, at: Tensor, seed: Tensor | None, temperature: Tensor | None, noise_scale: Tensor | None
) -> Tensor:
    return scores.new_empty(scores.shape[:2], dtype=torch.int64)
