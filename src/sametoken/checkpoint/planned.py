"""Plan of a model's memory from headers alone: a decoder on the meta device, filled as in `load`.

Blocks that are stored alike are planned once. If weight files are absent, tensor names are read from the index, and
shapes from config.json.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from sametoken.checkpoint.cut import own_part
from sametoken.checkpoint.experts import FUSED, PACKED, TURNED, single_experts
from sametoken.checkpoint.fill import load_parameters
from sametoken.checkpoint.gguf import LINK
from sametoken.checkpoint.gguf.container import read_container
from sametoken.checkpoint.gguf.directory import read_gguf
from sametoken.checkpoint.hub import read_config, stored_scheme
from sametoken.checkpoint.mapping import DecoderRules, rules_for
from sametoken.checkpoint.quantised.collect import Item, collected, modules
from sametoken.checkpoint.quantised.scheme import Scheme
from sametoken.checkpoint.quantised.shapes import part_shape
from sametoken.checkpoint.tensors import INDEX, absent_tensors, read_tensors
from sametoken.files import json_object
from sametoken.model.compiled_layers import blocks_of
from sametoken.model.config import ModelConfig
from sametoken.model.cut import cut
from sametoken.model.decoder import Decoder
from sametoken.model.formats.coded import Coded
from sametoken.model.formats.names import FORMATS
from sametoken.model.held import Share, held, summed
from sametoken.runtime.ranks import RankPart

WHOLE = RankPart()
LAYER = re.compile(r"(.*?\blayers\.)(\d+)(\..*)")
EXPERT = re.compile(r"(\.experts\.)\d+(\.)")


@dataclass(frozen=True)
class PlannedModel:
    """Sizes of a model, or of a part of it, in files and in memory.

    Attributes:
        config: configuration of the part, with the engine's context limit.
        stored: bytes and tensors of the files, by format; computed from config.json if files are absent.
        stated_bytes: bytes of all files according to the index; None without one.
        held: bytes and weights in memory, by format.
        outside: bytes of `held` outside of blocks: embedding, output head, norm, rotary tables.
    """

    config: ModelConfig
    stored: dict[str, Share]
    stated_bytes: int | None
    held: dict[str, Share]
    outside: int


class _Blocks(NamedTuple):
    """Blocks that are stored alike, by their numbers in the files; the first is planned for all."""

    layers: tuple[int, ...]

    @property
    def first(self) -> int:
        return self.layers[0]


def planned_model(
    directory: Path, dtype: torch.dtype, max_seq_len: int | None = None, quantization: str = "none",
    part: RankPart = WHOLE,
) -> PlannedModel:  # fmt: skip
    """Plan the memory of the decoder that `load.load_decoder` returns for these arguments; see `planned_for` for CUDA.

    Raises:
        CheckpointError, UnsupportedModelError: as `load_decoder`, for errors that headers show.
        ConfigError: the model cannot be cut into `part.size` parts.
    """
    config, scheme = ModelConfig.from_hf(read_config(directory), max_seq_len), stored_scheme(directory)
    file = directory / LINK if (directory / LINK).exists() else directory
    own = cut(config, part)
    with torch.device("meta"):
        rules, found = rules_for(config), _stated(directory)
        blocks_only = {name: tensor for name, tensor in found.items() if not rules.ignores(name)}
        groups = _alike(blocks_only)
        ours = {group.first: place for place, group in enumerate(groups)}
        first, form = [group.first for group in groups], FORMATS.get(quantization)
        decoder = Decoder(_shortened(own, first), dtype, form)
        names = [name for name in found if name not in blocks_only or (layer := _layer(name)) is None or layer in ours]
        if None in found.values():
            whole = decoder if part == WHOLE else Decoder(_shortened(config, first), dtype, form)
            stored = _indexed(names, whole, config, scheme, ours)
        else:
            stored = {name: tensor for name in names if (tensor := found[name]) is not None}
        items: Iterator[Item] = (Item(name, tensor, file) for name, tensor in stored.items())
        if scheme is not None and file.name != LINK:
            items = collected(items, names, scheme)
        items = (item for item in single_experts(items, config, scheme) if not rules.ignores(item.name))
        items = (item._replace(name=_moved(item.name, ours)) for item in items)
        load_parameters(decoder, own_part(items, config, rules, part), rules_for(own), dtype, "meta")
        for rope in config.ropes:
            if rope is not None:
                decoder.rope_tables(torch.device("meta"), rope)
    blocks = blocks_of(decoder)
    shares = [held(decoder, without=blocks)]
    outside = sum(share.bytes for share in shares[0].values())
    shares += [_times(held(block), len(group.layers)) for block, group in zip(blocks, groups, strict=True)]
    times = {name: len(group.layers) for group in groups for name in blocks_only if _layer(name) == group.first}
    return PlannedModel(own, _sizes(directory, stored, scheme, times), _total(directory), summed(shares), outside)


def _stated(directory: Path) -> dict[str, Tensor | Coded | None]:
    """Tensors by name; None for a tensor that only an index names."""
    if (directory / LINK).exists():
        return dict(read_gguf(directory / LINK, data=False))
    if absent := absent_tensors(directory):
        return dict.fromkeys(absent)
    return {item.name: item.tensor for item in read_tensors(directory, data=False)}


def _layer(name: str) -> int | None:
    match = LAYER.fullmatch(name)
    return None if match is None else int(match[2])


def _alike(found: Mapping[str, Tensor | Coded | None]) -> list[_Blocks]:
    """Groups of blocks whose tensors have equal names, shapes and dtypes."""
    facts: dict[int, set[object]] = defaultdict(set)
    for name, tensor in found.items():
        match = LAYER.fullmatch(name)
        if match is not None:
            facts[int(match[2])].add((match[3], None if tensor is None else _facts(tensor)))
    groups: dict[frozenset[object], list[int]] = defaultdict(list)
    for layer in sorted(facts):
        groups[frozenset(facts[layer])].append(layer)
    return [_Blocks(tuple(layers)) for layers in groups.values()]


def _facts(tensor: Tensor | Coded) -> object:
    if isinstance(tensor, Coded):
        return tensor.code, tensor.group, tensor.shape, tensor.step is None, tensor.offset is None
    return tuple(tensor.shape), tensor.dtype


def _shortened(config: ModelConfig, layers: list[int]) -> ModelConfig:
    """Configuration of a model with only the blocks `layers`."""
    experts, windows, last = config.experts, config.sliding_windows, config.num_layers - 1
    kept = [min(layer, last) for layer in layers]
    if experts is not None:
        experts = replace(experts, layers=tuple(experts.layers[layer] for layer in kept))
    return replace(
        config, num_layers=len(layers), sliding_windows=tuple(windows[layer] for layer in kept), experts=experts,
        layer_ropes=tuple(config.ropes[layer] for layer in kept) if config.layer_ropes else (),
    )  # fmt: skip


def _moved(name: str, ours: Mapping[int, int]) -> str:
    """Name of a tensor with the number of its block among the planned blocks."""
    match = LAYER.fullmatch(name)
    return name if match is None else f"{match[1]}{ours[int(match[2])]}{match[3]}"


def _indexed(
    names: Iterable[str], decoder: Decoder, config: ModelConfig, scheme: Scheme | None, ours: Mapping[int, int]
) -> dict[str, Tensor | Coded]:
    """Tensors of an index, with shapes from the parameters of the decoder."""
    names = list(names)
    shapes = {name: tuple(parameter.shape) for name, parameter in decoder.named_parameters()}
    index = _Index(shapes, rules_for(config), config, scheme, modules(names))
    known: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    found: dict[str, Tensor | Coded] = {}
    for name in names:
        own = EXPERT.sub(r"\g<1>0\2", name)  # all experts of a block are alike
        if own not in known:
            known[own] = index.shape(own, _moved(own, ours))
        found[name] = torch.empty(known[own][0], dtype=known[own][1])
    return found


class _Index(NamedTuple):
    """Lookup of the shape and dtype of a tensor of which only the name is known."""

    shapes: Mapping[str, tuple[int, ...]]
    rules: DecoderRules
    config: ModelConfig
    scheme: Scheme | None
    quantised: Mapping[str, set[str]]

    def shape(self, name: str, moved: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of the tensor `name`, called `moved` in the decoder; one float32 if it is no weight."""
        dtype: torch.dtype = getattr(torch, self.config.dtype)
        if self.config.experts is not None and (packed := PACKED.fullmatch(moved)):
            count, rows, inputs = self._fused(packed[2], packed[3], "weight")
            return (count, rows, inputs // 32, *([16] if packed[4] == "blocks" else [])), torch.uint8
        if self.config.experts is not None and (fused := FUSED.fullmatch(moved)):
            count, *own = self._fused(fused[1], fused[2], "bias" if fused[3] else "weight")
            return (count, *(own[::-1] if self.config.family in TURNED else own)), dtype
        module, _, kind = name.rpartition(".")
        if kind in self.quantised.get(module, ()) and self.scheme is not None and (layer := self.scheme.layer(module)):
            weight = self._placed(f"{moved.rpartition('.')[0]}.weight")
            if weight is not None and len(weight) == 2:
                return part_shape(kind, (weight[0], weight[1]), layer, self.scheme.tool)
        own_shape = None if self.rules.ignores(moved) else self._placed(moved)
        return ((1,), torch.float32) if own_shape is None else (own_shape, dtype)

    def _fused(self, prefix: str, part: str, kind: str) -> tuple[int, ...]:
        assert self.config.experts is not None
        return self.config.experts.count, *(self._placed(f"{prefix}.0.{part}.{kind}") or (1, 1))

    def _placed(self, name: str) -> tuple[int, ...] | None:
        """Shape of the place of a tensor in the decoder; None without a place."""
        place = self.rules.place(name)
        if place is None or place.parameter not in self.shapes:
            return None
        whole = self.shapes[place.parameter]
        return whole if place.rows is None else (len(place.rows), *whole[1:])


def _times(shares: Mapping[str, Share], times: int) -> dict[str, Share]:
    return {name: Share(share.bytes * times, share.tensors * times) for name, share in shares.items()}


def _sizes(
    directory: Path, stored: Mapping[str, Tensor | Coded], scheme: Scheme | None, times: Mapping[str, int]
) -> dict[str, Share]:
    """Bytes and tensors of the files by format; all tensors of a quantised weight count for its format."""
    if (directory / LINK).exists():
        entries = read_container(directory / LINK).entries.values()
        return summed({entry.type.name: Share(entry.nbytes, 1)} for entry in entries)
    quantised = modules(stored)

    def shares() -> Iterator[dict[str, Share]]:
        for name, tensor in stored.items():
            module, _, kind = name.rpartition(".")
            coded = scheme is not None and (kind in quantised.get(module, ()) or PACKED.fullmatch(name))
            form = scheme.name if coded and scheme else str(getattr(tensor, "dtype", "")).removeprefix("torch.")
            yield _times({form: Share(tensor.nbytes, 1)}, times.get(name, 1))

    return summed(shares())


def _total(directory: Path) -> int | None:
    """Bytes of all weight files according to their index; None if it has no such number."""
    try:
        stated = json_object(directory / INDEX)["metadata"]["total_size"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return int(stated) if isinstance(stated, int | float) else None
