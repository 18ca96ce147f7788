"""Operations on the modules of heads of every kind: packing for serving, rounding for files, and their tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from sametoken.errors import UnsupportedModelError
from sametoken.model.formats.coded import Coded
from sametoken.model.formats.rounding import Rounding
from sametoken.model.linear import Embedding, Linear


def pack(module: nn.Module) -> None:
    """Pack every linear of a head that will only be served."""
    for part in module.modules():
        if isinstance(part, Linear | Embedding):
            part.deterministic = False  # a guess may differ beside other rows; it changes no token
            part.pack()


def linears(module: nn.Module) -> dict[str, Linear]:
    """The linear layers of a head by name, its output layers included."""
    return {name: part for name, part in module.named_modules() if isinstance(part, Linear)}


def check_groups(module: nn.Module, rounding: Rounding) -> None:
    """Raise `UnsupportedModelError` where the inputs of a linear layer are no whole groups."""
    size = rounding.group or 8
    for name, linear in linears(module).items():
        if linear.in_features % size:
            raise UnsupportedModelError(
                f"{name} of the head has {linear.in_features} inputs, expected a multiple of {size}; choose another "
                "format or group size"
            )


def round_linears(module: nn.Module, rounding: Rounding) -> None:
    """Round the weight of every linear layer of a plain head, which from now on holds its codes.

    Raises:
        UnsupportedModelError: the inputs of a layer are no whole groups.
    """
    check_groups(module, rounding)
    for linear in linears(module).values():
        linear.coded = rounding(linear.weight.detach())
        del linear.weight


def parameters_of(module: nn.Module) -> Iterator[tuple[str, Tensor | Coded]]:
    """The parameters of a head by name, those that are rounded as their codes."""
    for name, linear in linears(module).items():
        if linear.coded is not None:
            yield f"{name}.weight", linear.coded
    for name, parameter in module.named_parameters():
        yield name, parameter.detach()


def rows_of(weight: Tensor | Coded, rows: range | None) -> Tensor | Coded:
    """Some of a parameter's rows; None is all of them."""
    if rows is None:
        return weight
    return weight.outputs(torch.tensor(rows)) if isinstance(weight, Coded) else weight[rows.start : rows.stop]
