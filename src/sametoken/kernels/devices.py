"""Choice of the kernels for a tensor's work: Triton on CUDA, where it is installed; else torch or the CPU's.

A tensor on the meta device has a shape and no data. It stands for one that will lie on the CPU, or on CUDA where
`planned_for` says so: modules pack such tensors as they pack real ones, which tells what they will hold.
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
    """True if our Triton kernels compute on x."""
    return x.is_cuda and TRITON


def device_type(x: Tensor) -> str:
    """ "cpu" or "cuda": where x lies or, on the meta device, where it will lie."""
    return _planned.get() if x.is_meta else x.device.type


@contextmanager
def planned_for(kind: str) -> Iterator[None]:
    """Treat tensors on the meta device as tensors that will be on a device of type `kind`, within the block."""
    token = _planned.set(kind)
    try:
        yield
    finally:
        _planned.reset(token)
