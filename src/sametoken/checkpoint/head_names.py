"""Where each tensor of a head belongs, in every producer's spelling, and what it is called when it is written.

Sources: SafeAILab/EAGLE, SpecForge, Model-Optimizer, speculators, SGLang (EAGLE); FasterDecoding/Medusa, vLLM (Medusa).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from sametoken.checkpoint.mapping import DERIVED, TABLE, Place, rules_for, split_name
from sametoken.model.head_config import EagleConfig, MedusaConfig

# Stored module -> module of the head; a decoder's table and what only heads have.
EAGLE_TABLE = {
    **TABLE,
    "fc": ("fc", None),
    "input_norm": ("input_norm", None),
    "fc_norm.N": ("fc_norms.N", None),
    "layers.N.embed_norm": ("blocks.N.embed_norm", None),
    "layers.N.hidden_norm": ("blocks.N.hidden_norm", None),
}
# Spellings that mean the same; the right one is used here.
SPELLINGS = (
    (re.compile(r"^model\."), ""),
    (re.compile(r"^midlayer\.(?=\d)"), "layers."),
    (re.compile(r"^midlayer\."), "layers.0."),
    (re.compile(r"^aux_norm_low\."), "fc_norm.0."),
    (re.compile(r"^aux_norm_mid\."), "fc_norm.1."),
    (re.compile(r"^aux_norm_high\."), "fc_norm.2."),
)
MAPS = ("d2t", "t2d")  # integers, which are read apart
INSIDE = "eagle_module."  # before the names of a head in the midst of Model-Optimizer's training checkpoints
# What trainers keep beside a head and no engine reads.
NOT_NEEDED = re.compile(r"verifier_(lm_head|norm)\.weight")

_MEDUSA_PREFIX = re.compile(r"^(model\.)?medusa_heads?\.")
# Three digits at most: no head has more parts, and a larger number would be counted up to.
_LINEAR = re.compile(r"(\d{1,3})\.(\d{1,3})\.linear\.(weight|bias)|blocks\.(\d{1,3})\.layers\.(\d{1,3})\.(weight|bias)")
_OUTPUT = re.compile(r"(\d{1,3})\.\d{1,3}\.weight|lm_heads\.(\d{1,3})\.weight")


def plain_name(name: str) -> str:
    """A tensor's name of an EAGLE head in the one spelling of the table."""
    for spelling, ours in SPELLINGS:
        name = spelling.sub(ours, name)
    return name


@dataclass(frozen=True)
class EagleNames:
    """The table above for one head.

    EAGLE-3's first `input_layernorm` norms the token vector, every other one a block's hidden state.
    """

    rows: Mapping[str, range]
    version: int

    @classmethod
    def of(cls, config: EagleConfig) -> EagleNames:
        return cls(rules_for(config.layers).rows, config.version)

    def ignores(self, name: str) -> bool:
        plain = plain_name(name)
        return plain in MAPS or bool(DERIVED.fullmatch(plain) or NOT_NEEDED.fullmatch(plain))

    def place(self, name: str) -> Place | None:
        path, index, kind = split_name(plain_name(name))
        if path not in EAGLE_TABLE:
            return None
        ours, piece = EAGLE_TABLE[path]
        if self.version == 3 and index == "0" and path == "layers.N.input_layernorm":
            ours = "blocks.N.embed_norm"
        elif index != "0" and path == "layers.N.hidden_norm":  # TensorRT-LLM's name in further blocks
            ours = "blocks.N.attention_norm"
        return Place(f"{ours.replace('N', index)}.{kind}", self.rows[piece] if piece else None)

    def sources(self, parameter: str, taken: Sequence[range]) -> list[str]:
        return [name for name, rows in self.stored(parameter) if rows is None or rows not in taken]

    def stored(self, parameter: str) -> list[tuple[str, range | None]]:
        """The names under which a parameter is written, each with its rows; None is all of them."""
        path, index, kind = split_name(parameter)
        if path == "blocks.N.embed_norm":
            path = "blocks.N.attention_norm"
        found = [(name, piece) for name, (ours, piece) in EAGLE_TABLE.items() if ours == path]
        parts = [(name, piece) for name, piece in found if piece] or found
        return [(f"{name.replace('N', index)}.{kind}", self.rows[piece] if piece else None) for name, piece in parts]


@dataclass(frozen=True)
class MedusaNames:
    """Names of Medusa heads, alone or inside the checkpoint of a whole model.

    Attributes:
        own_heads: heads have output layers; otherwise a stored one is a copy of the target's.
    """

    own_heads: bool

    def ignores(self, name: str) -> bool:
        return medusa_place(name) is None or (not self.own_heads and _is_output(name))

    def place(self, name: str) -> Place | None:
        found = medusa_place(name)
        return None if found is None else Place(found, None)

    def sources(self, parameter: str, taken: Sequence[range]) -> list[str]:
        return [self.stored(parameter)]

    def stored(self, parameter: str, layers: int | None = None) -> str:
        """The FasterDecoding name of a parameter; its heads' output layers follow `layers` residual blocks."""
        parts = parameter.split(".")  # heads.I.blocks.J.linear.KIND or heads.I.head.weight
        if parts[2] == "blocks":
            return f"{parts[1]}.{parts[3]}.linear.{parts[5]}"
        return f"{parts[1]}.{'L' if layers is None else layers}.weight"


def medusa_place(name: str) -> str | None:
    """The parameter of `MedusaHeads` that a stored tensor fills, None if it is no part of them."""
    bare = _MEDUSA_PREFIX.sub("", name)
    if inside := _LINEAR.fullmatch(bare):
        head, block, kind = (part for part in inside.groups() if part is not None)
        return f"heads.{head}.blocks.{block}.linear.{kind}"
    if output := _OUTPUT.fullmatch(bare):
        return f"heads.{output[1] or output[2]}.head.weight"
    return None


def _is_output(name: str) -> bool:
    return _OUTPUT.fullmatch(_MEDUSA_PREFIX.sub("", name)) is not None


def eagle_tensors(head: nn.Module, config: EagleConfig) -> Iterator[tuple[str, Tensor]]:
    """The parameters of an EAGLE head as they are stored: separate projections, `layers.N.` names."""
    names = EagleNames.of(config)
    for parameter, data in head.named_parameters():
        for name, rows in names.stored(parameter):
            yield name, data.detach() if rows is None else data.detach()[rows.start : rows.stop]


def medusa_tensors(head: nn.Module, config: MedusaConfig) -> Iterator[tuple[str, Tensor]]:
    """The parameters of Medusa heads under FasterDecoding's names."""
    names = MedusaNames(config.own_heads)
    for parameter, data in head.named_parameters():
        yield names.stored(parameter, config.num_layers), data.detach()
