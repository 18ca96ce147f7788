"""Common methods of EAGLE heads of all versions: recognise, fill, build. Subclasses add the differences."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from sametoken.checkpoint.fill import load_parameters
from sametoken.checkpoint.quantised.collect import Item
from sametoken.checkpoint.tensors import Stored
from sametoken.drafters.base import Drafter
from sametoken.heads.eagle.config import EagleConfig
from sametoken.heads.eagle.drafter import EagleDrafter
from sametoken.heads.eagle.facts import warnings
from sametoken.heads.eagle.layouts import Table, how_to_serve, reasons
from sametoken.heads.eagle.module import EagleHead
from sametoken.heads.eagle.names import INSIDE, EagleNames, plain_name
from sametoken.heads.eagle.vocabulary import WithMaps, offsets
from sametoken.heads.files import Files
from sametoken.heads.kind import CacheFor, HeadKind
from sametoken.model.config import ModelConfig
from sametoken.model.decoder import Decoder
from sametoken.model.formats.base import WeightFormat
from sametoken.model.formats.coded import Coded
from sametoken.options.speculation import SpeculativeConfig

PAIRED = "layers.0.hidden_norm.weight"  # attention reads token and hidden state concatenated: EAGLE-3


class Eagle(HeadKind):
    """Kind of heads of one or more blocks that draft from the target's hidden states and their own last output."""

    paired: bool  # true if attention of the first block reads token and hidden state concatenated

    def recognises(self, files: Files) -> bool:
        names = {plain_name(name) for name in files.seen}
        fused = "fc.weight" in names or any(name.startswith(INSIDE) for name in names)
        return fused and (PAIRED in names) == self.paired

    def empty(self, config: EagleConfig, dtype: torch.dtype, format: WeightFormat | None = None) -> EagleHead:
        return EagleHead(config, dtype, format)

    def fill(
        self, head: EagleHead, stored: Iterator[Stored | Item], files: Files, device: torch.device | str, *, pack: bool
    ) -> None:
        kept = WithMaps(stored)
        load_parameters(head, kept, EagleNames.of(head.config), head.dtype, device, pack=pack)
        head.d2t = offsets(kept.maps, head.config, files.where).to(device)

    @abstractmethod
    def table(self, config: EagleConfig, tensors: Mapping[str, Tensor | Coded] | None) -> Table:
        """Table of the parts of a head that some engine does not support."""

    def refusals(
        self, config: EagleConfig, layout: str, tensors: Mapping[str, Tensor | Coded] | None = None
    ) -> list[str]:
        return reasons(self.table(config, tensors), layout)

    def advice(self, config: EagleConfig, layout: str) -> tuple[str, ...]:
        return how_to_serve(config, layout)

    def warnings(self, head: EagleHead, target: ModelConfig) -> Iterable[str]:
        return warnings(head, target)

    def cached_layers(self, module: EagleHead) -> ModelConfig:
        return module.config.layers

    def build(self, config: SpeculativeConfig, module: EagleHead, target: Decoder, cache_for: CacheFor) -> Drafter:
        cache = cache_for(module.config.layers, module.dtype)
        return EagleDrafter(
            module, target, cache,
            max_draft_len=config.max_draft_len, branches=config.tree_top_k, budget=config.budget,
        )  # fmt: skip
