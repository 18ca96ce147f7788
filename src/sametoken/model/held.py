"""Memory of modules by the format of their weights; on the meta device, the memory they will need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sametoken.kernels.cpu.library import (
    BF16,
    BLOCK_INT4,
    BLOCK_INT5,
    BLOCK_INT6,
    BLOCK_INT8,
    FP4,
    FP8,
    GROUPED_INT4,
    GROUPED_INT8,
    INT4,
    INT8,
    INT8_WEIGHT_ONLY,
)
from sametoken.model.linear import Embedding, Linear

# Layouts of the compiled kernels.
KERNELS = {
    BF16: "bfloat16", INT8: "int8", INT8_WEIGHT_ONLY: "int8", INT4: "int4", FP8: "FP8", FP4: "FP4",
    GROUPED_INT4: "int4", GROUPED_INT8: "int8", BLOCK_INT4: "int4", BLOCK_INT5: "int5", BLOCK_INT6: "int6",
    BLOCK_INT8: "int8",
}  # fmt: skip


class Share(NamedTuple):
    """Bytes and number of weights or tensors."""

    bytes: int
    tensors: int


def held(module: nn.Module, without: Iterable[nn.Module] = ()) -> dict[str, Share]:
    """Bytes and modules by format, the largest first; shared tensors count once.

    Scales, zero points and biases count as the format of their weight.

    Args:
        without: parts of the module that are left out.
    """
    left_out = {id(part) for whole in without for part in whole.modules()}
    found: list[dict[str, Share]] = []
    known: dict[Any, int] = {}
    for part in module.modules():
        if id(part) in left_out:
            continue
        name, sizes = _format(part), dict[str, int]()
        for tensor in _tensors({key: value for key, value in vars(part).items() if key != "_modules"}):
            place, nbytes = _storage(tensor)
            form = name or str(tensor.dtype).removeprefix("torch.")
            sizes[form] = sizes.get(form, 0) + max(0, nbytes - known.get(place, 0))
            known[place] = max(nbytes, known.get(place, 0))
        found.append({form: Share(size, 1) for form, size in sizes.items() if size})
    return summed(found)


def summed(shares: Iterable[Mapping[str, Share]]) -> dict[str, Share]:
    """Sums by format, the largest first."""
    found: dict[str, Share] = {}
    for each in shares:
        for name, share in each.items():
            have = found.get(name, Share(0, 0))
            found[name] = Share(have.bytes + share.bytes, have.tensors + share.tensors)
    return dict(sorted(found.items(), key=lambda item: -item[1].bytes))


def _format(module: nn.Module) -> str | None:
    """Format of a linear's weight or of a token embedding, None for a plain tensor."""
    if isinstance(module, Embedding) and module.table is not None:
        return KERNELS[module.table.weight.format]
    if not isinstance(module, Linear):
        return None
    if module.native is not None:
        return KERNELS[module.native.weight.format]
    if module.coded is not None:
        return module.coded.code.name.replace("INT", "int")
    return None if module.stored is None or module.format is None else module.format.name


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
