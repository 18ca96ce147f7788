"""Plan of the memory of a model's weights before they are loaded: bytes of a decoder on the meta device.

A plain model follows from its config.json. Tensors of a quantised model are those in the headers of its files, packed
like those of `load`, with one block for all blocks of equal tensors. Without the files, the size in the index is used.
`held_bytes` counts the bytes of modules.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sametoken.checkpoint.cut import own_part
from sametoken.checkpoint.experts import single_experts
from sametoken.checkpoint.fill import load_parameters
from sametoken.checkpoint.gguf import LINK
from sametoken.checkpoint.gguf.directory import read_gguf
from sametoken.checkpoint.hub import read_config, stored_scheme
from sametoken.checkpoint.load import refuse_to_round_again
from sametoken.checkpoint.mapping import SameNames, rules_for
from sametoken.checkpoint.quantised.collect import Item, collected
from sametoken.checkpoint.quantised.scheme import Scheme
from sametoken.checkpoint.tensors import INDEX, absent_tensors, read_tensors
from sametoken.errors import CheckpointError
from sametoken.files import json_object
from sametoken.model.compiled_layers import blocks_of
from sametoken.model.config import ModelConfig
from sametoken.model.cut import cut
from sametoken.model.decoder import Decoder
from sametoken.model.formats.coded import Coded
from sametoken.model.formats.names import FORMATS
from sametoken.runtime.ranks import RankPart

WHOLE = RankPart()
LAYER = re.compile(r"(.*?\blayers\.)(\d+)(\..*)")
Groups = list[list[int]]  # numbers of equal blocks; the first one stands for all


def planned_bytes(
    directory: Path, dtype: torch.dtype, max_seq_len: int | None = None, quantization: str = "none",
    part: RankPart = WHOLE, outputs: int | None = None,
) -> int:  # fmt: skip
    """Bytes of weights and rotary tables that `load.load_decoder` would hold, on the device of `planned_for`.

    Args:
        directory: checkpoint; a plain one needs no weight files, a quantised one needs an index at least.
        dtype: data type of weights that are not quantised.
        max_seq_len: context limit, by default the model's own.
        quantization: format for the weights of a plain checkpoint.
        part: part of a rank.
        outputs: tokens of a narrowed decoder, see `Decoder.narrowed`; None for the vocabulary.

    Raises:
        CheckpointError: see `load_decoder`; or an index does not state a size.
        UnsupportedModelError: see `load_decoder`.
        ConfigError: see `load_decoder`.
    """
    config, scheme = ModelConfig.from_hf(read_config(directory), max_seq_len), stored_scheme(directory)
    refuse_to_round_again(directory, quantization)
    own = cut(config, part)
    gguf = (directory / LINK).exists()
    with torch.device("meta"):
        if scheme is None and not gguf:
            return _plain(own, dtype, quantization, outputs)
        if scheme is not None and not gguf and absent_tensors(directory):
            return _by_index(directory, config, own, dtype, scheme, outputs)
        return _quantised(directory, config, own, dtype, scheme, part, outputs)


def _filled(config: ModelConfig, groups: Groups, dtype: torch.dtype, quantization: str = "none") -> Decoder:
    """Plain decoder with one block of each group, whose weights are packed."""
    decoder = Decoder(_shortened(config, groups), dtype, FORMATS.get(quantization))
    tensors = [(name, torch.empty_like(each, dtype=dtype)) for name, each in decoder.named_parameters()]
    load_parameters(decoder, (Item(name, each, Path()) for name, each in tensors), SameNames(), dtype, "meta")
    return decoder


def _plain(config: ModelConfig, dtype: torch.dtype, quantization: str, outputs: int | None) -> int:
    """Bytes of a plain model; its blocks are equal, except that some have experts."""
    sparse = (False,) * config.num_layers if config.experts is None else config.experts.layers
    groups = [[layer for layer, each in enumerate(sparse) if each == kind] for kind in dict.fromkeys(sparse)]
    decoder = _filled(config, groups, dtype, quantization)
    return _outside(decoder, config, outputs) + _inside(decoder, groups)


def _by_index(
    directory: Path, config: ModelConfig, own: ModelConfig, dtype: torch.dtype, scheme: Scheme, outputs: int | None
) -> int:
    """Bytes of a part of a quantised model, from the size in the index: equal parts of the blocks, and the rest."""
    try:
        size = int(json_object(directory / INDEX)["metadata"]["total_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{directory / INDEX} states no total_size; download the weights first") from error
    whole, rest = _filled(config, [[0]], getattr(torch, config.dtype)), _filled(own, [[0]], dtype)
    blocks = size - held_bytes(whole, without=blocks_of(whole))
    if any(layer.block is not None for _, layer in scheme.layers):
        blocks += blocks // 8  # kernels have a float32 scale per 32 inputs for these
    return _outside(rest, own, outputs) + blocks * own.num_heads // config.num_heads


def _quantised(
    directory: Path, config: ModelConfig, own: ModelConfig, dtype: torch.dtype, scheme: Scheme | None, part: RankPart,
    outputs: int | None,
) -> int:  # fmt: skip
    """Bytes of a part of a quantised model, from the headers of its files."""
    file = directory / LINK if (directory / LINK).exists() else directory
    rules = rules_for(config)
    found = (
        dict(read_gguf(file, data=False))
        if file.name == LINK
        else {item.name: item.tensor for item in read_tensors(directory, data=False)}
    )
    groups = _alike({name: tensor for name, tensor in found.items() if not rules.ignores(name)})
    places = {group[0]: place for place, group in enumerate(groups)}
    names = [name for name in found if rules.ignores(name) or _moved(name, places) is not None]
    items: Iterator[Item] = (Item(name, found[name], file) for name in names)
    if scheme is not None and file.name != LINK:
        items = collected(items, names, scheme)
    items = (item for item in single_experts(items, config, scheme) if not rules.ignores(item.name))
    items = (item._replace(name=_moved(item.name, places) or "") for item in items)
    decoder = Decoder(_shortened(own, groups), dtype, None)
    load_parameters(decoder, own_part(items, config, rules, part), rules_for(own), dtype, "meta")
    return _outside(decoder, own, outputs) + _inside(decoder, groups)


def _outside(decoder: Decoder, config: ModelConfig, outputs: int | None) -> int:
    """Bytes outside the blocks: embeddings, last norm, lm_head, rotary tables."""
    if outputs is not None:
        decoder = decoder.narrowed(torch.zeros(outputs, dtype=torch.int64))
    for rope in config.ropes:
        if rope is not None:
            decoder.rope_tables(torch.device("meta"), rope)
    return held_bytes(decoder, without=blocks_of(decoder))


def _inside(decoder: Decoder, groups: Groups) -> int:
    """Bytes of all blocks."""
    return sum(held_bytes(block) * len(group) for block, group in zip(blocks_of(decoder), groups, strict=True))


def _alike(found: Mapping[str, Tensor | Coded]) -> Groups:
    """Groups of blocks whose tensors have equal names, shapes and data types."""
    facts: dict[int, set[object]] = defaultdict(set)
    for name, tensor in found.items():
        match = LAYER.fullmatch(name)
        if match is not None:
            facts[int(match[2])].add((match[3], _facts(tensor)))
    groups: dict[frozenset[object], list[int]] = defaultdict(list)
    for layer in sorted(facts):
        groups[frozenset(facts[layer])].append(layer)
    return list(groups.values())


def _facts(tensor: Tensor | Coded) -> object:
    if isinstance(tensor, Coded):
        return tensor.code, tensor.group, tensor.shape, tensor.step is None, tensor.offset is None
    return tuple(tensor.shape), tensor.dtype


def _shortened(config: ModelConfig, groups: Groups) -> ModelConfig:
    """Configuration of a model of the first block of each group."""
    experts, windows, last = config.experts, config.sliding_windows, config.num_layers - 1
    kept = [min(group[0], last) for group in groups]
    if experts is not None:
        experts = replace(experts, layers=tuple(experts.layers[layer] for layer in kept))
    return replace(
        config, num_layers=len(groups), sliding_windows=tuple(windows[layer] for layer in kept), experts=experts,
        layer_ropes=tuple(config.ropes[layer] for layer in kept) if config.layer_ropes else (),
    )  # fmt: skip


def _moved(name: str, places: Mapping[int, int]) -> str | None:
    """Name of a tensor in the shortened model; None if another block stands for that of the tensor."""
    match = LAYER.fullmatch(name)
    if match is None:
        return name
    place = places.get(int(match[2]))
    return None if place is None else f"{match[1]}{place}{match[3]}"


def held_bytes(module: nn.Module, without: Iterable[nn.Module] = ()) -> int:
    """Bytes of all tensors of a module; shared ones count once.

    Args:
        module: module whose parameters may be packed.
        without: parts of the module that are left out.
    """
    left_out = {id(part) for whole in without for part in whole.modules()}
    known: dict[Any, int] = {}
    for part in module.modules():
        if id(part) not in left_out:
            for tensor in _tensors({key: value for key, value in vars(part).items() if key != "_modules"}):
                place, nbytes = _storage(tensor)
                known[place] = max(nbytes, known.get(place, 0))
    return sum(known.values())


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield all tensors inside a value."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))


def _storage(tensor: Tensor) -> tuple[Any, int]:
    """Identity of a tensor's storage, and the number of its bytes there."""
    if tensor.layout is not torch.strided:  # private to oneDNN
        return id(tensor), tensor.nbytes
    storage = tensor.untyped_storage()
    return storage._cdata, min(storage.nbytes(), tensor.nbytes)
