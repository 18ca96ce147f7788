"""Medusa: heads that guess several places ahead from the target's last hidden state, after its norm.

FasterDecoding and vLLM write the heads alone, Model-Optimizer inside the checkpoint of the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sametoken.checkpoint.fill import load_parameters
from sametoken.checkpoint.quantised.collect import Item
from sametoken.checkpoint.tensors import Stored
from sametoken.drafters.base import Drafter
from sametoken.errors import CheckpointError, DraftMismatchError, UnsupportedModelError
from sametoken.heads.files import Files, mapping
from sametoken.heads.kind import NO_SUCH_DRAFTS, CacheFor, Described, HeadKind, Written
from sametoken.heads.medusa.config import MedusaConfig
from sametoken.heads.medusa.drafter import MedusaDrafter, tree_of
from sametoken.heads.medusa.module import MedusaHeads
from sametoken.heads.medusa.names import MedusaNames, medusa_place, medusa_tensors
from sametoken.kinds import OURS
from sametoken.model.config import ModelConfig
from sametoken.model.decoder import Decoder
from sametoken.model.formats.base import WeightFormat
from sametoken.model.formats.coded import Coded
from sametoken.options.speculation import SpeculativeConfig


def describe_medusa(files: Files, target: ModelConfig) -> tuple[MedusaConfig, str, tuple[str, ...]]:
    """Describe Medusa heads: their number and depth are counted in the tensors and compared with config.json."""
    places = {place: seen for name, seen in files.seen.items() if (place := medusa_place(name)) is not None}
    heads = 1 + max(int(place.split(".")[1]) for place in places)
    blocks = [int(place.split(".")[3]) for place in places if ".blocks." in place]
    stated = {**files.config, **mapping(files.config.get("medusa"))}
    vllm = is_vllm_medusa(files)
    _agree(files.where, "heads", heads, stated, ("medusa_num_heads", "num_medusa_heads", *(("num_heads",) * vllm)))
    depth = ("medusa_num_layers", "num_medusa_layers", *(("num_hidden_layers",) * vllm))
    _agree(files.where, "layers", layers := 1 + max(blocks, default=-1), stated, depth)
    if "token_map" in files.seen or stated.get("truncated_vocab_size") not in (None, target.vocab_size):
        raise UnsupportedModelError(
            f"{files.where}: Medusa heads over a truncated vocabulary are not supported; use ones with all "
            f"{target.vocab_size} tokens"
        )
    own = any(place.endswith(".head.weight") for place in places) and not stated.get("original_lm_head")
    sample = next(iter(places.values()))
    width = next((s.shape[-1] for p, s in places.items() if p.endswith("weight")), 0)
    rows = next((s.shape[0] for p, s in places.items() if p.endswith(".head.weight")), target.vocab_size)
    for name, got, expected in (
        ("hidden size", width, target.hidden_size),
        ("vocabulary", rows if own else target.vocab_size, target.vocab_size),
    ):
        if got != expected:
            raise DraftMismatchError(
                f"{files.where}: Medusa heads for a {name} of {got}, the target's is {expected}; they were trained "
                "beside another model"
            )
    modelopt = "medusa" in files.config and any("medusa_heads." in name for name in files.seen)
    notes = ["ModelOpt trains head i on the label i + 1 places on: shifted labels give the usual i + 2"] * modelopt
    config = MedusaConfig(
        num_heads=heads,
        num_layers=layers,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        own_heads=own,
        dtype=str(sample.dtype).removeprefix("torch."),
        choices=_choices(files),
    )
    producer = "sametoken" if OURS in files.config else "vLLM" if vllm else "ModelOpt" if modelopt else "FasterDecoding"
    return config, producer, tuple(notes)


def is_vllm_medusa(files: Files) -> bool:
    """True if tensors have the names of vLLM, where blocks may lack a bias."""
    return any(name.removeprefix("medusa_heads.").startswith("blocks.") for name in files.seen)


def _choices(files: Files) -> tuple[tuple[int, ...], ...]:
    """Static tree from config.json as paths of ranks, parents first; () if absent."""
    paths = mapping(files.config.get(OURS)).get("choices", files.config.get("medusa_choices")) or []
    good = isinstance(paths, list) and all(
        isinstance(path, list) and path and all(isinstance(rank, int) and rank >= 0 for rank in path) for path in paths
    )
    if not good:
        raise CheckpointError(f"{files.where}: medusa_choices is {paths!r}, expected lists of ranks")
    return tuple(sorted((tuple(path) for path in paths), key=lambda path: (len(path), path)))


def _agree(where: Path, what: str, counted: int, stated: Mapping[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        if stated.get(name) not in (None, counted):
            raise CheckpointError(
                f"{where}: config.json has {name} = {stated[name]!r}, but the weights have {counted} {what}; the files "
                "are incomplete or belong to different heads"
            )


def lay_out(head: MedusaHeads, layout: str, target_name: str) -> Written:
    """Files of heads in `layout`."""
    config, tensors = head.config, dict(medusa_tensors(head, head.config))
    if layout == "vllm":
        made: dict[str, Any] = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "num_heads": config.num_heads,
            "num_hidden_layers": config.num_layers,
            "medusa_fc_bias": True,
            "torch_dtype": config.dtype,
        }
        return Written(made, {_vllm_name(name): tensor for name, tensor in tensors.items()}, "model.safetensors")
    made = {
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
        "base_model_name_or_path": target_name,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "torch_dtype": config.dtype,
        OURS: {"choices": [list(path) for path in config.choices]},
    }
    return Written(made, tensors, "medusa_lm_head.safetensors")


def _vllm_name(name: str) -> str:
    head, block, *rest = name.split(".")  # I.J.linear.KIND or I.L.weight
    return f"blocks.{head}.layers.{block}.{rest[1]}" if rest[0] == "linear" else f"lm_heads.{head}.weight"


def refusals(config: MedusaConfig, layout: str) -> list[str]:
    """Reasons why an engine cannot run the heads."""
    if layout in ("sglang", "trtllm", "speculators"):
        return [NO_SUCH_DRAFTS]
    if layout == "vllm" and not config.own_heads:
        return ["heads without output layers: it reads a copy of the target's, which the head does not hold"]
    return []


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
