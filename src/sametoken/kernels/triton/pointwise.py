"""RoPE and gated activation in one kernel each, for CUDA: in small batches, kernel launches cost more than arithmetic.

The roundings are those of `rotary.apply_rope` and `layers.gated`. Importing this module needs triton; with
TRITON_INTERPRET=1 it runs on the CPU. Legend: T tokens, D head size, I intermediate size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit(do_not_specialize=["stride"])  # type: ignore[untyped-decorator]
def _rotate(  # type: ignore[no-untyped-def]
    x, cos, sin, out, stride, heads,
    SIZE: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Apply RoPE to one head of one token."""
    token, head = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, PADDED)
    rotated = lane < DIM
    source = x + token * stride + head * SIZE
    own = tl.load(source + lane, mask=lane < SIZE, other=0.0)
    partner = lane ^ 1 if INTERLEAVED else tl.where(lane < DIM // 2, lane + DIM // 2, lane - DIM // 2)
    other = tl.load(source + partner, mask=rotated, other=0.0)
    c = tl.load(cos + token * DIM + lane, mask=rotated, other=0.0)
    s = tl.load(sin + token * DIM + lane, mask=rotated, other=0.0)
    straight = (own.to(tl.float32) * c.to(tl.float32)).to(own.dtype).to(tl.float32)
    crossed = (other.to(tl.float32) * s.to(tl.float32)).to(own.dtype).to(tl.float32)
    turned = tl.where(rotated, (straight + crossed).to(own.dtype), own)
    tl.store(out + (token * heads + head) * SIZE + lane, turned, mask=lane < SIZE)


@triton.jit(do_not_specialize=["width"])  # type: ignore[untyped-decorator]
def _silu_gated(gate_up, out, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute one block of the activation of one token."""
    token, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + token * 2 * width + at, mask=at < width, other=0.0)
    up = tl.load(gate_up + token * 2 * width + width + at, mask=at < width, other=0.0)
    wide = gate.to(tl.float32)
    active = tl.div_rn(wide, 1.0 + tl.exp(-wide)).to(gate.dtype).to(tl.float32)
    tl.store(out + token * width + at, (active * up.to(tl.float32)).to(gate.dtype), mask=at < width)


@torch.library.custom_op("sametoken::rotate", mutates_args=())
def _rotate_operator(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    tokens, heads, size = x.shape
    out, dim = x.new_empty(x.shape), cos.shape[-1]
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        _rotate[(tokens, heads)](
            x, cos, sin, out, x.stride(0), heads,
            SIZE=size, DIM=dim, PADDED=triton.next_power_of_2(size), INTERLEAVED=interleaved, num_warps=1,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out


@_rotate_operator.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("sametoken::silu_gated", mutates_args=())
def _gated_operator(gate_up: Tensor) -> Tensor:
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, width)
    with torch.cuda.device_of(gate_up):  # type: ignore[no-untyped-call]
        _silu_gated[(tokens, triton.cdiv(width, BLOCK))](gate_up, out, width, BLOCK=BLOCK, enable_fp_fusion=False)
    return out


@_gated_operator.register_fake
def _(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """`rotary.apply_rope` for x [T, heads, D] whose tokens may be strided, and cos and sin [T, 1, dim]."""
    turned: Tensor = _rotate_operator(x, cos, sin, interleaved)
    return turned


def silu_gated(gate_up: Tensor) -> Tensor:
    """silu(gate) * up [T, I] of contiguous [T, 2 I]."""
    out: Tensor = _gated_operator(gate_up)
    return out
