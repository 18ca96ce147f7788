"""Exponential noise as a pure function of (seed, position, token): the only source of randomness in sampling.

A counter-based hash in wrapping integers. The bits do not depend on the order or the batch of the calls.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15  # the increment and multipliers of splitmix64 (Steele, Lea, Flood 2014)
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_CHOICE = 0xD1B54A32D192ED03  # any odd constant: separates the seeds of choices from the keys of positions
_LOW_BIAS_1 = 0x7FEB352D  # the 32-bit finaliser of least avalanche bias known (Wellons, hash-prospector)
_LOW_BIAS_2 = 0x846CA68B
_BELOW_ONE = 1.0 - 2.0**-24


def wrap64(value: int) -> int:
    """Value modulo 2**64 as a signed 64-bit integer, the type of seed tensors."""
    return _signed(value, 64)


def choice_seed(seed: int, choice: int) -> int:
    """Seed of the i-th of n choices, signed 64-bit; choice 0 keeps the request's own seed."""
    if choice == 0:
        return wrap64(seed)
    return wrap64(_mix_int(_mix_int(seed ^ _CHOICE) + choice * _GOLDEN))


def noise(seed: Tensor, position: Tensor, tokens: Tensor) -> Tensor:
    """Exponential(1) variates.

    Args:
        seed: [R] int64.
        position: [R] int64, absolute position in the sequence of the token to be drawn.
        tokens: [R, K] or [K] int64 token ids, 0 .. 2**31 - 1.

    Returns:
        [R, K] float32 in [2**-33, 16.7]. Resolution is finest near 0, where the winners of `argmax(p / E)` are.
    """
    return uniform(seed, position, tokens).neg_().log1p_().neg_()


def uniform(seed: Tensor, position: Tensor, tokens: Tensor) -> Tensor:
    """Variates of [2**-33, 1) from the same bits; arguments as for `noise`."""
    drawn = _hash(seed, position, tokens).to(torch.float32).mul_(2.0**-32).add_(2.0**-33)
    # The hash is signed: negative values stand for the upper half of [0, 1). Without the clamp, E could be infinite.
    return drawn.sub_(drawn.floor()).clamp_(max=_BELOW_ONE)


def _hash(seed: Tensor, position: Tensor, tokens: Tensor) -> Tensor:
    """Hash [R, K] int32 of (seed, position, token), uniform over all 2**32 values."""
    key = _mix(_mix(seed + wrap64(_GOLDEN)) + position * wrap64(_GOLDEN))
    low, high = key.unsqueeze(1).view(torch.int32).unsqueeze(2).unbind(1)
    # The second word enters mid-way: were both xored in front, two positions could share their noise up to a
    # permutation of neighbouring tokens.
    h = tokens.to(torch.int32) ^ low
    scratch = torch.empty_like(h)
    _fold(h, 16, scratch).mul_(_LOW_BIAS_1)
    h ^= high
    _fold(h, 15, scratch).mul_(_signed(_LOW_BIAS_2, 32))
    return _fold(h, 16, scratch)


def _fold(h: Tensor, shift: int, scratch: Tensor) -> Tensor:
    """Compute h ^= h >>> shift in place; reusing `scratch` saves allocations, which cost more than the arithmetic."""
    torch.bitwise_right_shift(h, shift, out=scratch)
    return h.bitwise_xor_(scratch.bitwise_and_((1 << (32 - shift)) - 1))


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 over int64; masks turn arithmetic shifts into logical ones."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * wrap64(_MIX_1)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * wrap64(_MIX_2)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _mix_int(x: int) -> int:
    """`_mix` for one Python integer, unsigned."""
    mask = (1 << 64) - 1
    x &= mask
    x = ((x ^ (x >> 30)) * _MIX_1) & mask
    x = ((x ^ (x >> 27)) * _MIX_2) & mask
    return x ^ (x >> 31)


def _signed(value: int, bits: int) -> int:
    middle = 1 << (bits - 1)
    return ((value + middle) & ((1 << bits) - 1)) - middle
