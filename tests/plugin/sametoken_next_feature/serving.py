"""How next-feature heads are read, written and served."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from sametoken.checkpoint.fill import load_parameters
from sametoken.checkpoint.mapping import SameNames
from sametoken.checkpoint.tensors import Stored
from sametoken.drafters.base import Drafter
from sametoken.errors import CheckpointError, DraftMismatchError
from sametoken.heads.files import Files
from sametoken.heads.kind import CacheFor, Described, HeadKind, Written
from sametoken.model.config import ModelConfig
from sametoken.model.decoder import Decoder
from sametoken.model.formats.base import WeightFormat
from sametoken.options.speculation import SpeculativeConfig
from sametoken_next_feature.drafter import NextFeatureDrafter
from sametoken_next_feature.head import NextFeatureConfig, NextFeatureHead

INNER, HIDDEN, VOCABULARY = "next_feature_inner_size", "hidden_size", "vocab_size"  # keys of config.json


class NextFeature(HeadKind):
    """Next-feature heads: their files have our own layout alone."""

    def recognises(self, files: Files) -> bool:
        return INNER in files.config

    def describe(self, files: Files, target: ModelConfig) -> Described:
        inner, hidden, vocabulary = (_integer(files.config, key) for key in (INNER, HIDDEN, VOCABULARY))
        if (hidden, vocabulary) != (target.hidden_size, target.vocab_size):
            raise DraftMismatchError(
                f"{files.where}: made for a target of width {hidden} with {vocabulary} tokens, this one has "
                f"{target.hidden_size} and {target.vocab_size}; train a head for this target"
            )
        config = NextFeatureConfig(hidden, vocabulary, inner, str(files.config.get("torch_dtype", "bfloat16")))
        facts = {"reads": "the target's last hidden state, after its norm", "inner size": str(inner)}
        return Described(config, "sametoken-next-feature", (), facts)

    def empty(
        self, config: NextFeatureConfig, dtype: torch.dtype, format: WeightFormat | None = None
    ) -> NextFeatureHead:
        return NextFeatureHead(config, dtype, format)

    def fill(
        self, head: NextFeatureHead, stored: Iterator[Stored], files: Files, device: torch.device | str, *, pack: bool
    ) -> None:
        load_parameters(head, stored, SameNames(), head.dtype, device, pack=pack)

    def lay_out(self, head: NextFeatureHead, target: ModelConfig, layout: str, target_name: str) -> Written:
        config = head.config
        made = {
            "architectures": ["NextFeatureHead"], HIDDEN: config.hidden_size, VOCABULARY: config.vocab_size,
            INNER: config.inner_size, "torch_dtype": config.dtype,
        }  # fmt: skip
        tensors = {name: parameter.detach() for name, parameter in head.named_parameters()}
        return Written(made, tensors, "model.safetensors")

    def build(
        self, config: SpeculativeConfig, module: NextFeatureHead, target: Decoder, cache_for: CacheFor
    ) -> Drafter:
        return NextFeatureDrafter(module, target, config.max_draft_len)


def _integer(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int):
        raise CheckpointError(f"config.json of the head has {value!r} for {key!r}, expected an integer")
    return value
