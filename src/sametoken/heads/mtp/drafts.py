"""Prediction blocks (MTP): EAGLE heads of one of the target's own blocks, behind two norms, inside its checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sametoken.checkpoint.experts import single_experts
from sametoken.checkpoint.fill import load_parameters
from sametoken.checkpoint.hub import stored_scheme
from sametoken.checkpoint.mapping import rules_for
from sametoken.checkpoint.quantised.collect import Item
from sametoken.checkpoint.tensors import Stored
from sametoken.errors import DraftMismatchError, UnsupportedModelError
from sametoken.heads.eagle.config import EagleConfig
from sametoken.heads.eagle.drafts import Eagle
from sametoken.heads.eagle.facts import facts_of
from sametoken.heads.eagle.layouts import Table
from sametoken.heads.eagle.module import EagleHead
from sametoken.heads.files import Files
from sametoken.heads.kind import Described, Written
from sametoken.heads.mtp.names import DEEPSEEK, LAYOUTS, SHARED, MtpLayout, MtpNames
from sametoken.model.config import ModelConfig
from sametoken.model.formats.coded import Coded


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


INSTEAD = "leave --method out, or give a draft of another kind"
NOT_WRITTEN = "a prediction block stays in the checkpoint of its target, which other engines read themselves"


class Mtp(Eagle):
    """Kind of the prediction blocks inside checkpoints; only the method names them."""

    paired = False

    def recognises(self, files: Files) -> bool:
        return False

    def describe(self, files: Files, target: ModelConfig) -> Described:
        layout = LAYOUTS.get(target.family)
        if layout is None:
            raise UnsupportedModelError(
                f"method 'mtp': {files.where} is of the family {target.family}, expected one with prediction blocks "
                f"({', '.join(LAYOUTS)}); {INSTEAD}"
            )
        config = MtpConfig.of(target, layout)
        prefix = layout.prefix_after(target.num_layers)
        if not any(name.startswith(prefix) for name in files.seen):
            raise DraftMismatchError(
                f"method 'mtp': {files.where} has no prediction block (tensors {prefix}*), which some tools leave out; "
                f"give a checkpoint that has it, {INSTEAD}"
            )
        several = f"{target.further_layers} prediction blocks, of which the first makes every guess"
        facts = facts_of(config, target, "the target's last hidden state, after its norm")
        return Described(config, "the target's", (several,) if target.further_layers > 1 else (), facts)

    def reads(self, config: MtpConfig, name: str) -> bool:
        own = name.removeprefix(config.layout.prefix_after(config.first))
        return own != name and not own.startswith(SHARED)

    def fill(
        self, head: EagleHead, stored: Iterator[Stored | Item], files: Files, device: torch.device | str, *, pack: bool
    ) -> None:
        config = head.config
        assert isinstance(config, MtpConfig)
        names = MtpNames(config.layout, config.layout.prefix_after(config.first), rules_for(config.layers))
        single = single_experts((Item(*item) for item in stored), config.layers, stored_scheme(files.where))
        load_parameters(head, single, names, head.dtype, device, pack=pack)

    def table(self, config: EagleConfig, tensors: Mapping[str, Tensor | Coded] | None) -> Table:
        return [(True, ("hf", "vllm", "sglang", "trtllm", "speculators"), NOT_WRITTEN)]

    def lay_out(self, head: EagleHead, target: ModelConfig, layout: str, target_name: str) -> Written:
        raise UnsupportedModelError(NOT_WRITTEN)
