"""Heads on disk: whether a directory holds one, and the module it becomes.

The one place where foreign conventions (names, ids of layers, maps of the vocabulary) become ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from sametoken.checkpoint.contents import states_head
from sametoken.checkpoint.hub import read_json
from sametoken.checkpoint.load import Stored, load_parameters, read_tensors, seen_tensors
from sametoken.errors import CheckpointError, ConfigError, DraftMismatchError
from sametoken.heads.anyhead import HeadConfig
from sametoken.heads.describe import describe
from sametoken.heads.eagle.config import EagleConfig
from sametoken.heads.eagle.module import EagleHead
from sametoken.heads.eagle.names import INSIDE, EagleNames, plain_name
from sametoken.heads.files import HEAD_FILES, Files
from sametoken.heads.medusa.config import MedusaConfig
from sametoken.heads.medusa.module import MedusaHeads
from sametoken.heads.medusa.names import MedusaNames, medusa_place
from sametoken.heads.medusa.reading import is_vllm_medusa
from sametoken.heads.modules import pack as pack_linears
from sametoken.model.config import ModelConfig
from sametoken.model.formats.base import WeightFormat


class LoadedHead(NamedTuple):
    """A head and what had to be assumed about it, in words."""

    config: HeadConfig
    module: EagleHead | MedusaHeads
    notes: tuple[str, ...]


def is_head(directory: Path) -> bool:
    """Whether a directory holds a head rather than a whole model: config.json says so, or else the tensors' names."""
    try:
        config = read_json(directory / "config.json") or {}
        if states_head(config):
            return True
        found = {plain_name(name) for name in seen_tensors(directory, HEAD_FILES)} if config else set()
    except CheckpointError:
        return False  # whoever loads it says what is wrong
    return "fc.weight" in found or any(name.startswith(INSIDE) or medusa_place(name) is not None for name in found)


def read_head(
    directory: Path,
    target: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    pack: bool,
    format: WeightFormat | None = None,
) -> LoadedHead:
    """The head of a directory with its weights in place, whoever wrote it.

    Args:
        target: facts of the model it drafts for; its `max_position` bounds the rotary tables.
        dtype: of all parameters, whatever the files hold.
        pack: pack the linears, for serving; a head that will be trained or written again stays plain.
        format: what the linears are quantised to when they are packed, None for nothing.

    Raises:
        CheckpointError: a file is missing, damaged, or contradicts another.
        UnsupportedModelError: the kind of head or of weights is not implemented.
        DraftMismatchError: it was made for another target, or is another kind of head than it says.
    """
    files = Files.of(directory)
    described = describe(files, target)
    config = described.config
    with torch.device("meta"):
        module = _empty(config, dtype, format)
    stored = _Split(read_tensors(directory, HEAD_FILES))
    if isinstance(config, EagleConfig):
        load_parameters(module, stored, EagleNames.of(config), dtype, device, pack=pack)
    else:
        tensors = _with_zero_biases(stored, config, files)
        load_parameters(module, tensors, MedusaNames(config.own_heads), dtype, device, pack=pack)
    if isinstance(module, EagleHead):
        module.d2t = _offsets(stored.maps, module.config, directory).to(device)
    if pack:
        pack_linears(module)
    return LoadedHead(config, module, described.notes)


def stored_dtype(directory: Path) -> torch.dtype:
    """The widest floating dtype among a head's weights, which keeps all of their bits."""
    found = {item.dtype for item in Files.of(directory).seen.values()} & {torch.bfloat16, torch.float16, torch.float32}
    return found.pop() if len(found) == 1 else torch.float32


def with_taps(head: EagleHead | MedusaHeads, taps: tuple[int, ...], target: ModelConfig) -> EagleHead:
    """The same weights reading other layers of the target; the head itself is changed.

    Raises:
        ConfigError: it has no taps to choose, another number of them, or the target has no such layer.
    """
    if isinstance(head, MedusaHeads) or head.config.version == 1:
        raise ConfigError("this head reads the target's last hidden state; only EAGLE-3 has taps to choose")
    if len(taps) != len(head.config.taps):
        raise ConfigError(f"taps {list(taps)}: expected {len(head.config.taps)} layers, which its fc reads")
    if absent := [tap for tap in taps if not 0 <= tap < target.num_layers]:
        raise ConfigError(f"taps {list(taps)}: the target has layers 0 to {target.num_layers - 1}, not {absent[0]}")
    head.config = replace(head.config, taps=taps)
    return head


def _empty(config: HeadConfig, dtype: torch.dtype, format: WeightFormat | None) -> EagleHead | MedusaHeads:
    return EagleHead(config, dtype, format) if isinstance(config, EagleConfig) else MedusaHeads(config, dtype, format)


@dataclass
class _Split:
    """Stored tensors on their way to the parameters; the vocabulary's maps, which are integers, are kept aside."""

    tensors: Iterator[Stored]
    maps: dict[str, Tensor] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Stored]:
        for item in self.tensors:
            if (name := plain_name(item.name)) in ("d2t", "t2d"):
                self.maps[name] = item.tensor.clone()
            yield item


def _with_zero_biases(stored: _Split, config: MedusaConfig, files: Files) -> Iterator[Stored]:
    """Residual blocks without a bias, which vLLM writes unless `medusa_fc_bias` is set, have one of zeros here."""
    yield from stored
    if not is_vllm_medusa(files) or files.config.get("medusa_fc_bias"):
        return
    places = {medusa_place(name) for name in files.seen}
    for head in range(config.num_heads):
        for block in range(config.num_layers):
            if f"heads.{head}.blocks.{block}.linear.bias" not in places:
                yield Stored(f"{head}.{block}.linear.bias", torch.zeros(config.hidden_size), files.where)


def _offsets(maps: Mapping[str, Tensor], config: EagleConfig, directory: Path) -> Tensor:
    """The head's d2t as int64 offsets, checked against the vocabulary and against t2d."""
    size, vocabulary = config.draft_vocab_size, config.layers.vocab_size
    for name, tensor in maps.items():
        if tensor.is_floating_point() or tensor.dim() != 1:
            raise CheckpointError(
                f"{directory}: {name} holds {tensor.dtype} of shape {list(tensor.shape)}, expected integers in a row"
            )
    d2t = maps["d2t"].long() if "d2t" in maps else torch.zeros(size, dtype=torch.int64)
    if len(d2t) != size:
        raise CheckpointError(f"{directory}: d2t has {len(d2t)} entries, expected {size}, one per draft token")
    ids = torch.arange(size) + d2t
    hint = "; d2t must hold offsets (target id - draft id), these may be ids" if d2t.max() >= vocabulary - size else ""
    if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
        raise DraftMismatchError(
            f"{directory}: d2t names tokens {int(ids.min())} to {int(ids.max())}, the target's vocabulary has "
            f"{vocabulary}{hint}"
        )
    if (different := len(torch.unique(ids))) != size:
        raise CheckpointError(f"{directory}: d2t names {different} different tokens, expected {size}{hint}")
    if "t2d" in maps:
        _check_mask(maps["t2d"], ids, vocabulary, directory)
    return d2t


def _check_mask(t2d: Tensor, ids: Tensor, vocabulary: int, directory: Path) -> None:
    if len(t2d) != vocabulary:
        raise DraftMismatchError(f"{directory}: t2d has {len(t2d)} entries, the target's vocabulary {vocabulary}")
    expected = torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, ids, True)
    wrong = (t2d.bool() != expected).nonzero()
    if len(wrong):
        raise CheckpointError(
            f"{directory}: t2d and d2t disagree about {len(wrong)} tokens, first about {int(wrong[0])}; one of them "
            "belongs to another head"
        )
