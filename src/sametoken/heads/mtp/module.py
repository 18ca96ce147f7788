"""Prediction block of a checkpoint: an EAGLE head whose block is one of the target's own kind, behind two norms."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sametoken.heads.eagle.config import EagleConfig
from sametoken.heads.eagle.module import EagleHead
from sametoken.heads.mtp.names import DEEPSEEK, MtpLayout
from sametoken.model.config import ModelConfig
from sametoken.model.formats.base import WeightFormat
from sametoken.model.layers import RMSNorm


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
            block, 1, (), target.hidden_size, target.vocab_size, input_norm=True, own_head=False, layout=layout,
            first=target.num_layers,
        )  # fmt: skip

    @property
    def kind(self) -> str:
        return "mtp"

    @property
    def recycles_normed(self) -> bool:
        return self.layout.recycles_normed


class MtpHead(EagleHead):
    """Prediction block; each step reads norms of a token embedding and of a hidden state."""

    config: MtpConfig

    def __init__(self, config: MtpConfig, dtype: torch.dtype, format: WeightFormat | None = None) -> None:
        super().__init__(config, dtype, format)
        hidden, eps = config.layers.hidden_size, config.layers.norm_eps
        self.embed_norm, self.hidden_norm = RMSNorm(hidden, eps, dtype), RMSNorm(hidden, eps, dtype)

    def join(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        parts = [self.embed_norm(embedded), self.hidden_norm(hidden)]
        return torch.cat(parts[::-1] if self.config.layout.hidden_first else parts, dim=-1)
