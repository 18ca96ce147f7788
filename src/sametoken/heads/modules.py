"""What is done to the modules of heads of every kind: packing for serving."""

from __future__ import annotations

from torch import nn

from sametoken.model.linear import Embedding, Linear


def pack(module: nn.Module) -> None:
    """Packs every linear of a head that will only be served."""
    for part in module.modules():
        if isinstance(part, Linear | Embedding):
            part.deterministic = False  # a guess may differ beside other rows; it changes no token
            part.pack()
