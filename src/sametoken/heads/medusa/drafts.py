"""Medusa: heads that guess several places ahead from the target's last hidden state, after its norm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from sametoken.checkpoint.fill import load_parameters
from sametoken.checkpoint.quantised.collect import Item
from sametoken.checkpoint.tensors import Stored
from sametoken.drafters.base import Drafter
from sametoken.heads.files import Files
from sametoken.heads.kind import CacheFor, Described, HeadKind, Written
from sametoken.heads.medusa.config import MedusaConfig
from sametoken.heads.medusa.drafter import MedusaDrafter, tree_of
from sametoken.heads.medusa.layouts import lay_out, refusals
from sametoken.heads.medusa.module import MedusaHeads
from sametoken.heads.medusa.names import MedusaNames, medusa_place
from sametoken.heads.medusa.reading import describe_medusa, is_vllm_medusa
from sametoken.model.config import ModelConfig
from sametoken.model.decoder import Decoder
from sametoken.model.formats.base import WeightFormat
from sametoken.model.formats.coded import Coded
from sametoken.options.speculation import SpeculativeConfig


class Medusa(HeadKind):
    """Kind of Medusa heads, with the static tree that their files declare."""

    def recognises(self, files: Files) -> bool:
        return any(medusa_place(name) is not None for name in files.seen)

    def describe(self, files: Files, target: ModelConfig) -> Described:
        config, producer, notes = describe_medusa(files, target)
        tree = f"{len(config.choices)} nodes" if config.choices else "none stated: the chain of best guesses"
        facts = {
            "reads": "the target's last hidden state, after its norm",
            "heads": f"{config.num_heads} with {config.num_layers} residual blocks",
            "output layers": "their own" if config.own_heads else "the target's",
            "tree": tree,
        }
        return Described(config, producer, notes, facts)

    def empty(self, config: MedusaConfig, dtype: torch.dtype, format: WeightFormat | None = None) -> MedusaHeads:
        return MedusaHeads(config, dtype, format)

    def fill(
        self,
        head: MedusaHeads,
        stored: Iterator[Stored | Item],
        files: Files,
        device: torch.device | str,
        *,
        pack: bool,
    ) -> None:
        tensors = _with_zero_biases(stored, head.config, files)
        load_parameters(head, tensors, MedusaNames(head.config.own_heads), head.dtype, device, pack=pack)

    def lay_out(self, head: MedusaHeads, target: ModelConfig, layout: str, target_name: str) -> Written:
        return lay_out(head, layout, target_name)

    def refusals(
        self, config: MedusaConfig, layout: str, tensors: Mapping[str, Tensor | Coded] | None = None
    ) -> list[str]:
        return refusals(config, layout)

    def advice(self, config: MedusaConfig, layout: str) -> tuple[str, ...]:
        return ("vLLM serves Medusa up to 0.32 and drafts its best chain only",) if layout == "vllm" else ()

    def most_nodes(self, config: SpeculativeConfig, module: MedusaHeads) -> int:
        static = tree_of(module, config.max_draft_len, config.max_total_draft_tokens)
        return max(super().most_nodes(config, module), len(static))

    def build(self, config: SpeculativeConfig, module: MedusaHeads, target: Decoder, cache_for: CacheFor) -> Drafter:
        longest, budget = config.max_draft_len, config.max_total_draft_tokens
        return MedusaDrafter(module, target, max_draft_len=longest, budget=budget)


def _with_zero_biases(stored: Iterator[Stored | Item], config: MedusaConfig, files: Files) -> Iterator[Stored | Item]:
    """Add biases of zeros for residual blocks without bias, which vLLM writes unless `medusa_fc_bias` is set."""
    yield from stored
    if not is_vllm_medusa(files) or files.config.get("medusa_fc_bias"):
        return
    places = {medusa_place(name) for name in files.seen}
    for head in range(config.num_heads):
        for block in range(config.num_layers):
            if f"heads.{head}.blocks.{block}.linear.bias" not in places:
                yield Stored(f"{head}.{block}.linear.bias", torch.zeros(config.hidden_size), files.where)
