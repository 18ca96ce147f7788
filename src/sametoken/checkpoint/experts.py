"""Split of tensors that hold all experts of a block: one weight per expert, under the name of a plain linear layer."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from sametoken.checkpoint.quantised.collect import Item
from sametoken.checkpoint.quantised.layouts import DAMAGED, coded
from sametoken.checkpoint.quantised.scheme import Scheme, WeightScheme
from sametoken.errors import CheckpointError
from sametoken.model.config import ModelConfig
from sametoken.model.formats.coded import Coded

FUSED = re.compile(r"(.*\.(?:mlp|feed_forward)\.experts)\.(gate_up_proj|down_proj)(_bias)?")
PACKED = re.compile(r"((.*\.mlp\.experts)\.(gate_up_proj|down_proj))_(blocks|scales)")  # gpt-oss in MXFP4
SINGLE = re.compile(r"(.*\.(?:mlp|feed_forward)\.experts)\.\d+\.(gate_up_proj|down_proj)\.(weight|bias)")

# Families that store such weights as [experts, in, out], and those that interleave gates and ups.
TURNED, PAIRED = ("gpt_oss", "llama4_text"), ("gpt_oss",)


def single_experts(stored: Iterable[Item], config: ModelConfig, scheme: Scheme | None = None) -> Iterator[Item]:
    """Yield the tensors, with each one that holds all experts of a block split into one tensor per expert.

    Args:
        scheme: quantisation scheme of the checkpoint; None if its weights are not quantised.

    Raises:
        CheckpointError: a tensor's first dimension is not the number of experts, or blocks and scales in MXFP4 are
            damaged.
    """
    if scheme is not None and scheme.tool == "mxfp4" and config.experts is not None:
        stored = _unpacked(stored, config.experts.count, scheme)
    for item in stored:
        match = FUSED.fullmatch(item.name)
        if config.experts is None or match is None or not isinstance(item.tensor, Tensor):
            yield item
            continue
        count = config.experts.count
        sizes = 1 if match[3] else 2
        if item.tensor.dim() != 1 + sizes or item.tensor.shape[0] != count:
            raise CheckpointError(
                f"{item.name} has shape {list(item.tensor.shape)}, expected {count} experts of {sizes} dimensions; "
                "config.json and the weights describe different models",
                field=str(item.file),
            )
        for expert, weight in enumerate(item.tensor):
            if config.family in TURNED:
                weight = _own_order(weight, paired=config.family in PAIRED and match[2] == "gate_up_proj")
            yield Item(f"{match[1]}.{expert}.{match[2]}.{'bias' if match[3] else 'weight'}", weight, item.file)


def _own_order(stored: Tensor, *, paired: bool) -> Tensor:
    """Weight [in, out] or bias [out] as [out, ...], with gates before ups if they are interleaved (`paired`)."""
    turned = stored.t() if stored.dim() == 2 else stored
    return torch.cat([turned[::2], turned[1::2]]) if paired else turned


def _unpacked(stored: Iterable[Item], count: int, scheme: Scheme) -> Iterator[Item]:
    """Yield the tensors, with MXFP4 blocks and scales joined and split into one weight per expert.

    Blocks are [experts, out, in / 32, 16], scales [experts, out, in / 32].
    """
    waiting: dict[str, Item] = {}
    for item in stored:
        match = PACKED.fullmatch(item.name)
        layer = None if match is None else scheme.layer(match[1])
        if match is None or layer is None:
            yield item
            continue
        other = waiting.pop(match[1], None)
        if other is None or other.name == item.name:
            waiting[match[1]] = item
            continue
        blocks, scales = (item, other) if match[4] == "blocks" else (other, item)
        for expert, weight in enumerate(_packed_weights(blocks, scales, count, layer)):
            paired = match[3] == "gate_up_proj"
            places = torch.arange(weight.shape[0])
            weight = weight.outputs(torch.cat([places[::2], places[1::2]]) if paired else places)
            yield Item(f"{match[2]}.{expert}.{match[3]}.weight", weight, blocks.file)
    for module, item in waiting.items():
        absent = "scales" if item.name.endswith("_blocks") else "blocks"
        raise CheckpointError(f"{item.name} is there, but no {module}_{absent}; {DAMAGED}", field=str(item.file))


def _packed_weights(blocks: Item, scales: Item, count: int, layer: WeightScheme) -> Iterator[Coded]:
    """Weight of each expert, with outputs in the stored order."""
    codes = _bytes(blocks, "[experts, outputs, groups, 16]", lambda shape: len(shape) == 4 and shape[3] == 16)
    exponents = _bytes(scales, f"{list(codes.shape[:3])}", lambda shape: shape == codes.shape[:3])
    if len(codes) != count:
        raise CheckpointError(
            f"{blocks.name} has shape {list(codes.shape)}, expected {count} experts; config.json and the weights "
            "describe different models",
            field=str(blocks.file),
        )
    for expert in range(count):
        try:
            yield coded({"weight_packed": codes[expert].flatten(1), "weight_scale": exponents[expert]}, layer, "mxfp4")
        except CheckpointError as error:
            raise type(error)(f"{blocks.name}, expert {expert}: {error}", field=str(blocks.file)) from error


def _bytes(item: Item, expected: str, fits: Callable[[tuple[int, ...]], bool]) -> Tensor:
    """Tensor of an item; raise CheckpointError unless it is uint8 of a shape that `fits`."""
    if isinstance(item.tensor, Tensor) and item.tensor.dtype == torch.uint8 and fits(item.tensor.shape):
        return item.tensor
    dtype = f"{item.tensor.dtype} " if isinstance(item.tensor, Tensor) else ""
    raise CheckpointError(
        f"{item.name} is {dtype.removeprefix('torch.')}{list(item.tensor.shape)}, expected uint8 {expected}; {DAMAGED}",
        field=str(item.file),
    )


def joined_experts(tensors: Iterable[tuple[str, Tensor]], family: str) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors in the layout of a family in TURNED: the reverse of `single_experts`."""
    found: dict[str, list[Tensor]] = defaultdict(list)
    for name, tensor in tensors:
        match = SINGLE.fullmatch(name)
        if match is None:
            yield name, tensor
            continue
        paired = family in PAIRED and match[2] == "gate_up_proj"
        stored = torch.stack(tensor.chunk(2), 1).flatten(0, 1) if paired else tensor
        ending = "_bias" if match[3] == "bias" else ""
        found[f"{match[1]}.{match[2]}{ending}"].append(stored.t() if stored.dim() == 2 else stored)
    for name, experts in found.items():
        yield name, torch.stack(experts)
