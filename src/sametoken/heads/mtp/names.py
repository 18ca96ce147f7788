"""Layouts of prediction blocks in the files of each family, and the place of each of their tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sametoken.checkpoint.mapping import DecoderRules, ParameterRows


class MtpLayout(NamedTuple):
    """Layout of the prediction blocks of a family.

    Attributes:
        prefix: prefix of the first block's tensors; `{}` is the number of the target's layers.
        names: stored module -> module of the head, for the parts that a block of the target lacks.
        hidden_first: the fusion reads the hidden state before the token embedding.
        recycles_normed: the next guess reads the state after the last norm.
    """

    prefix: str
    names: Mapping[str, str]
    hidden_first: bool = False
    recycles_normed: bool = True

    def prefix_after(self, layers: int) -> str:
        """Prefix of the first block's tensors behind a target of so many layers."""
        return self.prefix.format(layers)


DEEPSEEK = MtpLayout(
    "model.layers.{}.",
    {"eh_proj": "fc", "enorm": "embed_norm", "hnorm": "hidden_norm", "shared_head.norm": "norm"},
)
MIMO = MtpLayout(
    "model.mtp_layers.0.",
    {"input_proj": "fc", "token_layernorm": "embed_norm", "hidden_layernorm": "hidden_norm", "final_layernorm": "norm"},
    hidden_first=True,
)
# By the family of the target. Sources: transformers' `MtpModel`, and the models of vLLM and SGLang.
LAYOUTS = {"deepseek_v3": DEEPSEEK, "glm4_moe": DEEPSEEK, "mimo": MIMO}
SHARED = ("embed_tokens.", "shared_head.head.")  # copies of the target's


@dataclass(frozen=True)
class MtpNames:
    """Places of the tensors of a prediction block, by the names of the whole checkpoint.

    Attributes:
        layout: layout of the files.
        prefix: prefix of the block's tensors.
        rules: places of the tensors of a decoder with this block alone.
    """

    layout: MtpLayout
    prefix: str
    rules: DecoderRules

    def ignores(self, name: str) -> bool:
        own = name.removeprefix(self.prefix)
        return own == name or own.startswith(SHARED) or self.rules.ignores(f"model.layers.0.{own}")

    def place(self, name: str) -> ParameterRows | None:
        module, _, kind = name.removeprefix(self.prefix).rpartition(".")
        if module in self.layout.names:
            return ParameterRows(f"{self.layout.names[module]}.{kind}", None)
        return self.rules.place(f"model.layers.0.{name.removeprefix(self.prefix)}")

    def sources(self, parameter: str, taken: Sequence[range]) -> list[str]:
        module, _, kind = parameter.rpartition(".")
        stored = [theirs for theirs, ours in self.layout.names.items() if ours == module]
        if stored:
            return [f"{self.prefix}{stored[0]}.{kind}"]
        return [name.replace("model.layers.0.", self.prefix, 1) for name in self.rules.sources(parameter, taken)]
