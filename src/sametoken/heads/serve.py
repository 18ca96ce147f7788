"""The draft of an engine: a head or a smaller model, loaded for drafting, with its kind."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sametoken.checkpoint.hub import read_json
from sametoken.checkpoint.load import WHOLE, load_decoder, refuse_to_round_again
from sametoken.drafters.base import Drafter
from sametoken.heads.kind import CacheFor, Weighted
from sametoken.heads.read import is_head, read_head
from sametoken.heads.registry import draft_model, head_kind, weighted
from sametoken.model.config import ModelConfig
from sametoken.model.decoder import Decoder
from sametoken.model.formats.names import FORMATS
from sametoken.options.speculation import MODEL_METHODS, SpeculativeConfig
from sametoken.runtime.ranks import RankPart

LOG = logging.getLogger("sametoken")


class LoadedDraft(NamedTuple):
    """A loaded draft with weights of its own.

    Attributes:
        kind: how it is served.
        module: a `Head` or a `Decoder`, packed.
    """

    kind: Weighted
    module: Any

    @property
    def method(self) -> str:
        """The method that it is made for."""
        return self.kind.kind.name

    @property
    def what(self) -> str:
        """Name of its kind, with the article."""
        return self.kind.kind.what

    @property
    def reads_target_head(self) -> bool:
        """True if it computes logits with the target's output head instead of one of its own."""
        return not isinstance(self.module, Decoder) and getattr(self.module, "head", None) is None

    @property
    def cached_layers(self) -> ModelConfig | None:
        """The blocks whose keys and values it keeps beside the target's, None for none."""
        return self.kind.cached_layers(self.module)

    def most_nodes(self, config: SpeculativeConfig) -> int:
        """Cache slots past the pending token that a draft may take."""
        return self.kind.most_nodes(config, self.module)

    def build(self, config: SpeculativeConfig, target: Decoder, cache_for: CacheFor) -> Drafter:
        """Its drafter; see `Weighted.build`."""
        return self.kind.build(config, self.module, target, cache_for)


def load_draft(
    directory: Path,
    target: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str,
    deterministic: bool,
    method: str | None = None,
    part: RankPart = WHOLE,
    *,
    cache: bool = False,
) -> LoadedDraft:
    """The head or the draft model of a directory.

    Args:
        target: facts of the model that it drafts for; its `max_position` bounds the rotary tables.
        quantization: what its weights are rounded to, a name in `model.formats.names`, or "none".
        deterministic: whether a draft model gives a token the same bits beside any other rows.
        method: what the user named, which may say of what kind a draft model is.
        part: what this process holds of a draft model.
        cache: see `load_decoder`.

    Raises:
        ConfigError: the distribution of the kind that was named, or that the files name, is broken; or weights that
            are quantised already would be rounded again.
    """
    if method in MODEL_METHODS:
        weighted(method)
    refuse_to_round_again(directory, quantization, "draft_quantization")
    if is_head(directory):
        head = read_head(directory, target, dtype, device, pack=True, format=FORMATS.get(quantization))
        for note in head.notes:
            LOG.warning(f"{directory}: {note}")
        return LoadedDraft(head_kind(head.config), head.module)
    kind = weighted(draft_model(read_json(directory / "config.json") or {}, method).name)
    decoder = load_decoder(directory, dtype, device, target.max_position, quantization, part, cache=cache)
    decoder.set_deterministic(deterministic)
    return LoadedDraft(kind, decoder)
