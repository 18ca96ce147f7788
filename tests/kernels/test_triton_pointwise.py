"""The fused pointwise kernels in Triton's interpreter against the functions they stand for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="triton is not installed: run `make test-triton`")

from sametoken.kernels.triton.pointwise import BLOCK, rotate, silu_gated
from sametoken.model.layers import gated
from sametoken.model.rotary import apply_rope

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter cuts bfloat16 off where a device rounds.
DTYPES = [torch.float32, torch.bfloat16 if DEVICE == "cuda" else torch.float16]


def randn(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("size", "dim"), [(64, 64), (96, 96), (96, 72), (16, 8)])
def test_rotation_is_the_rotation(dtype: torch.dtype, size: int, dim: int, interleaved: bool) -> None:
    """Bit for bit, of queries and keys that lie among values."""
    x = randn(3, 7, size, dtype=dtype, seed=1)[:, :5]
    cos, sin = randn(3, 1, dim, dtype=dtype, seed=2), randn(3, 1, dim, dtype=dtype, seed=3)
    expected = apply_rope(x, cos, sin, interleaved=interleaved)
    assert torch.equal(rotate(x.to(DEVICE), cos.to(DEVICE), sin.to(DEVICE), interleaved).cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [40, BLOCK + 24])
def test_the_gate_is_the_gate(dtype: torch.dtype, width: int) -> None:
    gate_up = 3 * randn(2, 2 * width, dtype=dtype, seed=4)
    found, expected = silu_gated(gate_up.to(DEVICE)).cpu(), gated(F.silu, gate_up)
    torch.testing.assert_close(found, expected, rtol=2e-6 if dtype == torch.float32 else 1e-2, atol=1e-6)
