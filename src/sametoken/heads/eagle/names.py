"""Tensor names of EAGLE heads: the names of all producers, and the names in written files.

Sources: SafeAILab/EAGLE, SpecForge, Model-Optimizer, speculators, SGLang.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from sametoken.checkpoint.mapping import DERIVED, TABLE, ParameterRows, filled, rules_for, split_name
from sametoken.heads.eagle.config import EagleConfig
from sametoken.heads.modules import parameters_of, rows_of
from sametoken.model.formats.coded import Coded

# Stored module -> module of the head: the table of decoders, and modules that only heads have.
EAGLE_TABLE = {
    **{name: place for name, place in TABLE.items() if "expert" not in place[0]},
    "fc": ("fc", None),
    "input_norm": ("input_norm", None),
    "fc_norm.N": ("fc_norms.N", None),
    "layers.N.embed_norm": ("blocks.N.embed_norm", None),
    "layers.N.hidden_norm": ("blocks.N.hidden_norm", None),
}
# Alternative names (left) and the ones used here (right).
SPELLINGS = (
    (re.compile(r"^model\."), ""),
    (re.compile(r"^midlayer\.(?=\d)"), "layers."),
    (re.compile(r"^midlayer\."), "layers.0."),
    (re.compile(r"^aux_norm_low\."), "fc_norm.0."),
    (re.compile(r"^aux_norm_mid\."), "fc_norm.1."),
    (re.compile(r"^aux_norm_high\."), "fc_norm.2."),
)
MAPS = ("d2t", "t2d")  # integers, which are read separately
INSIDE = "eagle_module."  # prefix of a head's names inside Model-Optimizer's training checkpoints
# Tensors that trainers store with a head and no engine reads.
NOT_NEEDED = re.compile(r"verifier_(lm_head|norm)\.weight")


def plain_name(name: str) -> str:
    """Canonical name of a tensor of an EAGLE head."""
    for spelling, ours in SPELLINGS:
        name = spelling.sub(ours, name)
    return name


@dataclass(frozen=True)
class EagleNames:
    """Mapping of stored names for one head.

    The first `input_layernorm` of EAGLE-3 norms the token embedding, every other one a block's hidden state.
    """

    rows: Mapping[str, range]
    version: int

    @classmethod
    def of(cls, config: EagleConfig) -> EagleNames:
        return cls(rules_for(config.layers).rows, config.version)

    def ignores(self, name: str) -> bool:
        plain = plain_name(name)
        return plain in MAPS or bool(DERIVED.fullmatch(plain) or NOT_NEEDED.fullmatch(plain))

    def place(self, name: str) -> ParameterRows | None:
        path, indices, kind = split_name(plain_name(name))
        if path not in EAGLE_TABLE:
            return None
        ours, piece = EAGLE_TABLE[path]
        if self.version == 3 and indices == ("0",) and path == "layers.N.input_layernorm":
            ours = "blocks.N.embed_norm"
        elif indices != ("0",) and path == "layers.N.hidden_norm":  # TensorRT-LLM's name in further blocks
            ours = "blocks.N.attention_norm"
        return ParameterRows(f"{filled(ours, indices)}.{kind}", self.rows[piece] if piece else None)

    def sources(self, parameter: str, taken: Sequence[range]) -> list[str]:
        return [name for name, rows in self.stored(parameter) if rows is None or rows not in taken]

    def stored(self, parameter: str) -> list[tuple[str, range | None]]:
        """Names under which a parameter is written, each with its rows, None for all rows."""
        path, indices, kind = split_name(parameter)
        if path == "blocks.N.embed_norm":
            path = "blocks.N.attention_norm"
        found = [(name, piece) for name, (ours, piece) in EAGLE_TABLE.items() if ours == path]
        parts = [(name, piece) for name, piece in found if piece] or found
        return [(f"{filled(name, indices)}.{kind}", self.rows[piece] if piece else None) for name, piece in parts]


def eagle_tensors(head: nn.Module, config: EagleConfig) -> Iterator[tuple[str, Tensor | Coded]]:
    """Yield the parameters of an EAGLE head in stored form: separate projections, `layers.N.` names."""
    names = EagleNames.of(config)
    for parameter, data in parameters_of(head):
        for name, rows in names.stored(parameter):
            yield name, rows_of(data, rows)
