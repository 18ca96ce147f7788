"""Configuration of Medusa heads from config.json and their tensors, for every producer.

FasterDecoding and vLLM write the heads alone, Model-Optimizer inside the checkpoint of the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sametoken.errors import CheckpointError, DraftMismatchError, UnsupportedModelError
from sametoken.heads.files import Files, mapping
from sametoken.heads.medusa.config import MedusaConfig
from sametoken.heads.medusa.names import medusa_place
from sametoken.kinds import OURS
from sametoken.model.config import ModelConfig


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
