"""Operations on the modules of all kinds of heads: packing for serving, quantisation for files, parameters."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from sametoken.errors import UnsupportedModelError
from sametoken.model.formats.coded import Coded
from sametoken.model.formats.rounding import Rounding
from sametoken.model.linear import Embedding, Linear


def pack(module: nn.Module) -> None:
    """Pack every linear of a head for serving."""
    for part in module.modules():
        if isinstance(part, Linear | Embedding):
            part.deterministic = False  # a guess may depend on the batch, since it changes no token
            part.pack()


def linears(module: nn.Module) -> dict[str, Linear]:
    """Linear layers of a head by name, output layers included."""
    return {name: part for name, part in module.named_modules() if isinstance(part, Linear)}


def check_groups(module: nn.Module, rounding: Rounding) -> None:
    """Raise `UnsupportedModelError` if the inputs of a linear layer are not a multiple of the group size."""
    size = rounding.group or 8
    for name, linear in linears(module).items():
        if linear.in_features % size:
            raise UnsupportedModelError(
                f"{name} of the head has {linear.in_features} inputs, expected a multiple of {size}; choose another "
                "format or group size"
            )


def round_linears(module: nn.Module, rounding: Rounding) -> None:
    """Quantise the weight of every linear layer of a plain head in place.

    Raises:
        UnsupportedModelError: the inputs of a layer are not a multiple of the group size.
    """
    check_groups(module, rounding)
    for linear in linears(module).values():
        linear.coded = rounding(linear.weight.detach())
        del linear.weight


def parameters_of(module: nn.Module) -> Iterator[tuple[str, Tensor | Coded]]:
    """Yield the parameters of a head by name, quantised ones as `Coded`."""
    for name, linear in linears(module).items():
        if linear.coded is not None:
            yield f"{name}.weight", linear.coded
    for name, parameter in module.named_parameters():
        yield name, parameter.detach()


def rows_of(weight: Tensor | Coded, rows: range | None) -> Tensor | Coded:
    """Rows of a parameter, None for all."""
    if rows is None:
        return weight
    return weight.outputs(torch.tensor(rows)) if isinstance(weight, Coded) else weight[rows.start : rows.stop]
