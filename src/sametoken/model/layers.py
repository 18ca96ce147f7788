"""Norm and gated activation: the parts of a block that use neither attention nor caches.

Legend: T tokens of the whole batch, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sametoken.kernels.devices import fused

# Up to so many elements torch does not share an activation among threads, gelu being the first to be shared. Beyond,
# a thread's share may end within a row, and the exponential of its last few elements is another function than that of
# whole vectors.
WHOLE_ROWS = 2**14

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension.

    Args:
        shift: number added to the weights.
    """

    def __init__(self, size: int, eps: float, dtype: torch.dtype, shift: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
        self.eps, self.shift = eps, shift

    def forward(self, x: Tensor) -> Tensor:  # [..., size] -> [..., size]
        if self.shift:  # in float32, as the sum has more digits than a narrow weight
            return F.rms_norm(x.float(), self.weight.shape, self.weight.float() + self.shift, self.eps).to(x.dtype)
        # Trained weights are float32 under narrower activations; torch has no fused norm of two dtypes.
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


def gated(activation: Callable[[Tensor], Tensor], gate_up: Tensor) -> Tensor:  # [T, 2 I] -> [T, I]
    """Product activation(gate) * up, for gate and up side by side."""
    if activation is F.silu and fused(gate_up):
        from sametoken.kernels.triton.pointwise import silu_gated

        return silu_gated(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    if gate_up.requires_grad:
        return activation(gate) * up
    return in_parts(activation, gate).mul_(up)


def in_parts(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:  # [T, I] -> [T, I]
    """Apply a function of single elements so that its results do not depend on the number of rows."""
    rows = max(1, WHOLE_ROWS // x.shape[-1])
    if x.device.type != "cpu" or len(x) <= rows:
        return function(x)
    return torch.cat([function(part) for part in torch.split(x, rows)])


def capped(scores: Tensor, cap: float) -> Tensor:  # [T, K] -> [T, K]
    """Scores bounded by cap tanh(score / cap)."""
    parts = torch.split(scores / cap, WHOLE_ROWS, dim=-1)  # wider rows would be shared among threads
    return torch.cat([in_parts(torch.tanh, part) for part in parts], -1).mul_(cap)


def clamped(gate_up: Tensor, gain: float, limit: float) -> Tensor:  # [T, 2 I] -> [T, I]
    """Activation of gpt-oss, for gate and up side by side: both are limited, and up is shifted by 1."""
    gate, up = gate_up.chunk(2, dim=-1)
    limited = torch.cat([gate.clamp(max=limit), up.clamp(-limit, limit) + 1], -1)
    return gated(lambda x: x * torch.sigmoid(gain * x), limited)
