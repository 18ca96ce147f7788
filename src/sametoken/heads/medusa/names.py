"""Tensor names of Medusa heads: the names of all producers, and the names in written files.

Sources: FasterDecoding/Medusa, vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from sametoken.checkpoint.mapping import ParameterRows
from sametoken.heads.medusa.config import MedusaConfig
from sametoken.heads.modules import parameters_of
from sametoken.model.formats.coded import Coded

_MEDUSA_PREFIX = re.compile(r"^(model\.)?medusa_heads?\.")
# Three digits at most: no head has more parts, and the loader counts up to the number.
_LINEAR = re.compile(r"(\d{1,3})\.(\d{1,3})\.linear\.(weight|bias)|blocks\.(\d{1,3})\.layers\.(\d{1,3})\.(weight|bias)")
_OUTPUT = re.compile(r"(\d{1,3})\.\d{1,3}\.weight|lm_heads\.(\d{1,3})\.weight")


@dataclass(frozen=True)
class MedusaNames:
    """Names of Medusa heads, alone or inside the checkpoint of a whole model.

    Attributes:
        own_heads: true if heads have output layers; otherwise a stored one is a copy of the target's.
    """

    own_heads: bool

    def ignores(self, name: str) -> bool:
        return medusa_place(name) is None or (not self.own_heads and _is_output(name))

    def place(self, name: str) -> ParameterRows | None:
        found = medusa_place(name)
        return None if found is None else ParameterRows(found, None)

    def sources(self, parameter: str, taken: Sequence[range]) -> list[str]:
        return [self.stored(parameter)]

    def stored(self, parameter: str, layers: int | None = None) -> str:
        """FasterDecoding's name of a parameter; output layers are numbered after `layers` residual blocks."""
        parts = parameter.split(".")  # heads.I.blocks.J.linear.KIND or heads.I.head.weight
        if parts[2] == "blocks":
            return f"{parts[1]}.{parts[3]}.linear.{parts[5]}"
        return f"{parts[1]}.{'L' if layers is None else layers}.weight"


def medusa_place(name: str) -> str | None:
    """Name of the parameter of `MedusaHeads` for a stored tensor, None for other tensors."""
    bare = _MEDUSA_PREFIX.sub("", name)
    if inside := _LINEAR.fullmatch(bare):
        head, block, kind = (part for part in inside.groups() if part is not None)
        return f"heads.{head}.blocks.{block}.linear.{kind}"
    if output := _OUTPUT.fullmatch(bare):
        return f"heads.{output[1] or output[2]}.head.weight"
    return None


def _is_output(name: str) -> bool:
    return _OUTPUT.fullmatch(_MEDUSA_PREFIX.sub("", name)) is not None


def medusa_tensors(head: nn.Module, config: MedusaConfig) -> Iterator[tuple[str, Tensor | Coded]]:
    """Yield the parameters of Medusa heads under FasterDecoding's names."""
    names = MedusaNames(config.own_heads)
    for parameter, data in parameters_of(head):
        yield names.stored(parameter, config.num_layers), data
