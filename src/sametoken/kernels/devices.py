"""Choice of kernels by device: Triton on CUDA, where it is installed; otherwise torch or the compiled CPU kernels.

A tensor on the meta device represents one on the CPU, or on CUDA inside `planned_for`: modules pack such tensors like
real ones, which gives the sizes of a module without its data.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec

from torch import Tensor

TRITON = find_spec("triton") is not None
_planned: ContextVar[str] = ContextVar("planned", default="cpu")


def fused(x: Tensor) -> bool:
    """True if the Triton kernels support x."""
    return x.is_cuda and TRITON


def device_type(x: Tensor) -> str:
    """Device type of x, "cpu" or "cuda"; on the meta device, of the tensor that x represents."""
    return _planned.get() if x.is_meta else x.device.type


@contextmanager
def planned_for(kind: str) -> Iterator[None]:
    """Treat tensors on the meta device as tensors on a device of type `kind`, within the block."""
    token = _planned.set(kind)
    try:
        yield
    finally:
        _planned.reset(token)
