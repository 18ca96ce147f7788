"""Whether a tensor's work goes to our Triton kernels: on CUDA, where Triton is installed. Torch computes the rest."""

from __future__ import annotations

from importlib.util import find_spec

from torch import Tensor

TRITON = find_spec("triton") is not None


def fused(x: Tensor) -> bool:
    """Whether kernels of ours compute on x."""
    return x.is_cuda and TRITON
