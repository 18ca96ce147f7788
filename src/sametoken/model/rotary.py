"""Rotary position embedding (RoPE): frequencies of every kind, tables of cos and sin, and their application.

Formulas are those of `transformers.modeling_rope_utils`, in its order of float32 operations. Two of its choices depend
on the length of a forward; here, the angles of a token depend only on its position and the engine (`frequencies`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from sametoken.kernels.devices import fused
from sametoken.model.rope_config import RopeConfig


def _exponents(rope: RopeConfig, device: torch.device | str) -> Tensor:
    return torch.arange(0, rope.dim, 2, device=device).float() / rope.dim


def _default(rope: RopeConfig, max_seq_len: int, device: torch.device | str) -> Tensor:
    return 1.0 / (rope.theta ** _exponents(rope, device))


def _linear(rope: RopeConfig, max_seq_len: int, device: torch.device | str) -> Tensor:
    return _default(rope, max_seq_len, device) / rope.factor


def _dynamic(rope: RopeConfig, max_seq_len: int, device: torch.device | str) -> Tensor:
    seen = torch.arange(1, max_seq_len + 1, device=device).clamp(min=rope.max_position).unsqueeze(1)
    stretch = (rope.factor * seen / rope.max_position) - (rope.factor - 1)
    # Two rotated dimensions have the single frequency 1 for every base; the exponent has its pole there.
    theta = rope.theta * stretch ** (rope.dim / max(rope.dim - 2, 1))
    return 1.0 / (theta ** _exponents(rope, device))


def _llama3(rope: RopeConfig, max_seq_len: int, device: torch.device | str) -> Tensor:
    plain = _default(rope, max_seq_len, device)
    wavelength = 2 * math.pi / plain
    low, high = rope.low_freq_factor, rope.high_freq_factor
    smooth = (rope.original_max_position / wavelength - low) / (high - low)
    between = (1 - smooth) * plain / rope.factor + smooth * plain
    scaled = torch.where(wavelength > rope.original_max_position / low, plain / rope.factor, between)
    return torch.where(wavelength < rope.original_max_position / high, plain, scaled)


def _yarn(rope: RopeConfig, max_seq_len: int, device: torch.device | str) -> Tensor:
    def dimension_of(rotations: float) -> float:
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return rope.dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(rope.dim // 2, device=device).float() - low) / width).clamp(0, 1)
    powers = rope.theta ** _exponents(rope, device)
    keep = 1 - ramp
    return 1.0 / (rope.factor * powers) * (1 - keep) + 1.0 / powers * keep


def _longrope(rope: RopeConfig, max_seq_len: int, device: torch.device | str) -> Tensor:
    factors = rope.long_factor if max_seq_len > rope.original_max_position else rope.short_factor
    return 1.0 / (torch.tensor(factors, device=device) * rope.theta ** _exponents(rope, device))


_KINDS: dict[str, Callable[[RopeConfig, int, torch.device | str], Tensor]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


def frequencies(rope: RopeConfig, max_seq_len: int, device: torch.device | str = "cpu") -> Tensor:
    """Radians per position, [dim / 2] float32, or [max_seq_len, dim / 2] where they differ by position (dynamic).

    Args:
        rope: configuration.
        max_seq_len: the engine's context limit in tokens. Longrope takes its long factors if and only if this exceeds
            `original_max_position`, once per engine as vLLM does: transformers changes factors as the text grows, which
            would mix keys with different factors in one cache.
        device: of the result.

    Dynamic NTK stretches by the token's own position, `max(position + 1, max_position)`: equal to transformers up to
    `max_position` and in token-by-token decoding beyond it, and independent of how a prompt is cut into chunks.
    """
    return _KINDS[rope.kind](rope, max_seq_len, device)


def attention_scaling(rope: RopeConfig) -> float:
    """Factor of cos and sin by which yarn and longrope sharpen attention over a stretched context."""
    if rope.kind not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1:
        return 1.0
    if rope.kind == "longrope":
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position))
    if rope.mscale and rope.mscale_all_dim:
        return (0.1 * rope.mscale * math.log(rope.factor) + 1) / (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1)
    return 0.1 * math.log(rope.factor) + 1


def rope_tables(
    rope: RopeConfig, max_seq_len: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Tables of cos and sin that a decoder indexes by position, once per forward.

    Cosines are not computed in each forward, since the bits of a vectorised cos may depend on neighbouring elements.

    Args:
        rope: the facts.
        max_seq_len: the engine's context limit in tokens: positions 0 .. max_seq_len - 1 have a row.
        device: of the tables.
        dtype: the activations' dtype; computed in float32 and rounded once, as transformers does, or not rounded if
            `rope` is `wide`.

    Returns:
        cos and sin, each [max_seq_len, dim]. The sine of a pair's first member is negated, which saves the negation in
        each layer.
    """
    positions = torch.arange(max_seq_len, device=device).float().unsqueeze(1)
    angles = positions * frequencies(rope, max_seq_len, device)
    scaling, dtype = attention_scaling(rope), torch.float32 if rope.wide else dtype
    cos, sin = (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)
    if rope.interleaved:
        return cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def query_scales(floor: float, gain: float, max_seq_len: int, device: torch.device | str = "cpu") -> Tensor:
    """Factors [max_seq_len] float32 of queries by position: 1 up to `floor` tokens, then growing with the logarithm of
    position / floor (Llama 4's attention temperature).

    Args:
        floor: number of tokens without scaling.
        gain: factor of the logarithm.
    """
    positions = torch.arange(max_seq_len, device=device).float()
    return torch.log1p(torch.floor((positions + 1) / floor)) * gain + 1


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Apply RoPE to the first `dim` dimensions of every head; the others are unchanged.

    Args:
        x: [T, heads, head_dim]; queries and keys side by side need one call.
        cos, sin: [T, 1, dim] rows of `rope_tables`; if of a wider dtype than x, RoPE is computed in that dtype.
        interleaved: pairs are adjacent, otherwise `dim / 2` apart (rotate-half); must match the tables.
    """
    if fused(x) and cos.dtype == x.dtype:
        from sametoken.kernels.triton.pointwise import rotate

        return rotate(x, cos, sin, interleaved)
    dim = cos.shape[-1]
    rotated = x[..., :dim].to(cos.dtype)
    if interleaved:
        swapped = rotated.reshape(*x.shape[:-1], dim // 2, 2).flip(-1).flatten(-2)
    else:
        swapped = torch.cat((rotated[..., dim // 2 :], rotated[..., : dim // 2]), -1)
    # Two products rounded apart, then their sum, not addcmul's single rounding: the bits of transformers in bf16.
    turned = (rotated * cos).add_(swapped.mul_(sin)).to(x.dtype)
    return turned if dim == x.shape[-1] else torch.cat((turned, x[..., dim:]), -1)


def rope_at(tables: tuple[Tensor, Tensor], positions: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of RoPE tables at `positions`; positions of padding and lookahead past the end get the last, unused row."""
    cos, sin = tables
    at = positions.clamp(max=cos.shape[0] - 1)
    return cos[at], sin[at]
