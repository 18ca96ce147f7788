"""Configuration of a prediction block: an EAGLE head whose block is one of the target's own kind, behind two norms."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sametoken.heads.eagle.config import EagleConfig
from sametoken.heads.mtp.names import DEEPSEEK, MtpLayout
from sametoken.model.config import ModelConfig


@dataclass(frozen=True)
class MtpConfig(EagleConfig):
    """Configuration of a prediction block; `layers` is the target with this block alone.

    Attributes:
        layout: names and order of the parts in the files.
        first: number of the target's layers, from which files count.
    """

    layout: MtpLayout = DEEPSEEK
    first: int = 0

    @classmethod
    def of(cls, target: ModelConfig, layout: MtpLayout) -> MtpConfig:
        """Configuration of the first prediction block of a target."""
        experts = target.experts
        block = replace(
            target, num_layers=1, further_layers=0, sliding_windows=(None,), layer_ropes=(), columns=None,
            tie_word_embeddings=False, experts=None if experts is None else replace(experts, layers=(True,)),
        )  # fmt: skip
        return cls(
            block, 1, (), target.hidden_size, target.vocab_size, input_norm=True, joined_norms=True, own_head=False,
            hidden_first=layout.hidden_first, layout=layout, first=target.num_layers,
        )  # fmt: skip

    @property
    def kind(self) -> str:
        return "mtp"

    @property
    def recycles_normed(self) -> bool:
        return self.layout.recycles_normed
