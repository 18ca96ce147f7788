"""Shapes and dtypes of the tensors in which a tool stores a weight [out, in], as `layouts` reads them.

They are needed if an index names tensors whose files are absent.
"""

from __future__ import annotations

import torch

from sametoken.checkpoint.quantised.scheme import FLOAT, WeightScheme

Shape = tuple[tuple[int, ...], torch.dtype]


def part_shape(kind: str, weight: tuple[int, int], layer: WeightScheme, tool: str) -> Shape:
    """Shape and dtype of one of a weight's tensors.

    Args:
        kind: last part of the tensor's name; an unknown one gives a single float32.
        weight: [out, in].
        layer: storage of the weight, as the checkpoint states it.
        tool: `quant_method` of the checkpoint.
    """
    outputs, inputs = weight
    group = inputs if layer.group is None or layer.group < 0 else layer.group
    groups, each = -(-inputs // group), 32 // layer.bits  # `each`: codes of an int32
    known: dict[str, Shape] = {
        "qweight": ((inputs, outputs // each) if tool == "awq" else (-(-inputs // each), outputs), torch.int32),
        "qzeros": ((groups, -(-outputs // each)), torch.int32),
        "scales": ((groups, outputs), torch.float16),
        "g_idx": ((inputs,), torch.int32),
        "weight_g_idx": ((inputs,), torch.int32),
        "weight_shape": ((2,), torch.int64),
        "weight_scale": _scale(weight, groups, layer),
        "weight_scale_inv": _scale(weight, groups, layer),
        "weight_zero_point": ((-(-outputs // each), groups), torch.int32),
        "weight": _codes(weight, layer),
        "weight_packed": ((outputs, -(-inputs // each)), torch.int32),
    }
    if layer.kind == FLOAT:
        known["weight_packed"] = (outputs, inputs // 2), torch.uint8
    return known.get(kind, ((1,), torch.float32))


def _codes(weight: tuple[int, int], layer: WeightScheme) -> Shape:
    if layer.bits == 4:
        return (weight[0], weight[1] // 2), torch.uint8
    return weight, torch.float8_e4m3fn if layer.kind == FLOAT else torch.int8


def _scale(weight: tuple[int, int], groups: int, layer: WeightScheme) -> Shape:
    outputs, inputs = weight
    if layer.block is not None:
        return (-(-outputs // layer.block[0]), -(-inputs // layer.block[1])), torch.float32
    if layer.kind == FLOAT and layer.bits == 4:
        return (outputs, groups), torch.float8_e4m3fn if layer.group == 16 else torch.uint8
    return (outputs, groups), torch.float32 if layer.kind == FLOAT else torch.bfloat16
