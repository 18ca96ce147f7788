"""Loaded draft of an engine: a head or a smaller model, with its kind."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sametoken.checkpoint.hub import read_json
from sametoken.checkpoint.load import WHOLE, load_decoder, refuse_to_round_again
from sametoken.drafters.base import Drafter
from sametoken.errors import ConfigError
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
    """Loaded draft with weights.

    Attributes:
        kind: interface for serving.
        module: packed `Head` or `Decoder`.
    """

    kind: Weighted
    module: Any

    @property
    def method(self) -> str:
        """Method of the draft's kind."""
        return self.kind.kind.name

    @property
    def what(self) -> str:
        """Name of the kind, with the article."""
        return self.kind.kind.what

    @property
    def reads_target_head(self) -> bool:
        """True if logits are computed with the target's output head."""
        return not isinstance(self.module, Decoder) and getattr(self.module, "head", None) is None

    @property
    def cached_layers(self) -> ModelConfig | None:
        """Configuration of the blocks with KV in the target's pages, None if there are none."""
        return self.kind.cached_layers(self.module)

    def most_nodes(self, config: SpeculativeConfig) -> int:
        """Most cache slots past the pending token that a draft may take."""
        return self.kind.most_nodes(config, self.module)

    def build(self, config: SpeculativeConfig, target: Decoder, cache_for: CacheFor) -> Drafter:
        """Build the drafter; see `Weighted.build`."""
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
    rope_scaling: Mapping[str, Any] | None = None,
    tokens: Tensor | None = None,
) -> LoadedDraft:
    """Load the head or the draft model of a directory.

    Args:
        target: configuration of the target; its `max_position` bounds the RoPE tables.
        quantization: format of the weights, a name in `model.formats.names`, or "none".
        deterministic: true if the bits of a draft model's results must not depend on the batch.
        method: method that the user named, which may determine the kind of a draft model.
        part: part of a draft model in this process.
        cache, rope_scaling: of a draft model, see `load_decoder`.
        tokens: ids [N] that a draft model guesses, None for the vocabulary.

    Raises:
        ConfigError: the distribution of the kind that the user or the files name is broken, or quantised weights would
            be quantised again, or the kind of a draft model has all tokens.
    """
    if method in MODEL_METHODS:
        weighted(method)
    refuse_to_round_again(directory, quantization, "draft_quantization")
    if is_head(directory, method):
        head = read_head(directory, target, dtype, device, pack=True, format=FORMATS.get(quantization), method=method)
        for note in head.notes:
            LOG.warning(f"{directory}: {note}")
        return LoadedDraft(head_kind(head.config), head.module)
    kind = weighted(draft_model(read_json(directory / "config.json") or {}, method).name)
    if tokens is not None and not kind.narrows:
        raise ConfigError(f"{directory} is {kind.kind.what}, which guesses all tokens; leave out draft_vocab_size")
    decoder = load_decoder(
        directory, dtype, device, target.max_position, quantization, part, cache=cache, rope_scaling=rope_scaling
    )
    decoder.set_deterministic(deterministic)
    return LoadedDraft(kind, decoder if tokens is None else decoder.narrowed(tokens.to(device)))
