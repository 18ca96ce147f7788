"""Bytes of the tensors of modules; on the meta device, those of the modules that stand on a real one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn


def held_bytes(module: nn.Module, without: Iterable[nn.Module] = ()) -> int:
    """Bytes of all tensors of a module; shared ones count once.

    Args:
        module: module whose parameters may be packed.
        without: parts of the module that are left out.
    """
    left_out = {id(part) for whole in without for part in whole.modules()}
    known: dict[Any, int] = {}
    for part in module.modules():
        if id(part) not in left_out:
            for tensor in _tensors({key: value for key, value in vars(part).items() if key != "_modules"}):
                place, nbytes = _storage(tensor)
                known[place] = max(nbytes, known.get(place, 0))
    return sum(known.values())


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield all tensors inside a value."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))


def _storage(tensor: Tensor) -> tuple[Any, int]:
    """Identity of a tensor's storage, and the number of its bytes there."""
    if tensor.layout is not torch.strided:  # private to oneDNN
        return id(tensor), tensor.nbytes
    storage = tensor.untyped_storage()
    return storage._cdata, min(storage.nbytes(), tensor.nbytes)
