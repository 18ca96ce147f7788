"""Blocks of a decoder or a head in the structures of the compiled kernels.

Structures point into the tensors of blocks, so the owner of a structure must keep its block alive.
"""

from __future__ import annotations

from ctypes import pointer
from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from sametoken.kernels.cpu.library import PackedWeight
from sametoken.kernels.cpu.structures import CExperts, CGate, Layer, Weight, struct_of
from sametoken.model.block import Block
from sametoken.model.config import ModelConfig
from sametoken.model.linear import Linear

LANES = 16  # numbers of a vector: rows and heads are whole vectors
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_pytorch_tanh": 2}
NORMS = ("attention_norm", "q_norm", "k_norm", "mlp_norm", "attention_out_norm", "mlp_out_norm")


def blocks_of(module: nn.Module) -> list[Block]:
    """Blocks of a decoder or a head, in order."""
    return cast("list[Block]", list(cast("nn.ModuleList", module.blocks)))


def linears_of(block: Block) -> list[Linear]:
    experts = block.experts
    if experts is None:
        return [block.qkv, block.out, block.gate_up, block.down]
    each = [linear for expert in experts.every for linear in (expert.gate_up, expert.down)]
    return [block.qkv, block.out, experts.router, *each]


def packed(linear: Linear) -> PackedWeight:
    """Weight of a linear in the kernels' packed layout."""
    assert linear.native is not None
    return linear.native


def layer_of(
    block: Block, experts: CExperts | None, rope: tuple[Tensor, Tensor] | None, query_scale: Tensor | None
) -> Layer:
    norms = {name: getattr(block, name) for name in NORMS}
    cos, sin = (None, None) if rope is None else rope
    weights = ("qkv", "out") if experts is not None else ("qkv", "out", "gate_up", "down")
    found: Layer = struct_of(
        Layer, window=block.window or 0, sinks=None if block.sinks is None else block.sinks.detach(),
        experts=None if experts is None else pointer(experts), cos=cos, sin=sin,
        query_scale=query_scale,
        **{name: None if norm is None else norm.weight.detach() for name, norm in norms.items()},
        **{name: packed(getattr(block, name)).weight for name in weights},
    )  # fmt: skip
    return found


def experts_of(block: Block, config: ModelConfig) -> CExperts | None:
    experts = block.experts
    if experts is None:
        return None
    facts, count = experts.config, len(experts.every)
    gate_up, down = (
        (Weight * count)(*(packed(getattr(each, name)).weight for each in experts.every))
        for name in ("gate_up", "down")
    )
    gain, limit = facts.clamp or (0.0, 0.0)
    stated = experts.choice_bias
    bias = None if stated is None else F.pad(stated.detach(), (0, -facts.count % LANES))
    found: CExperts = struct_of(
        CExperts, count=facts.count, chosen=facts.chosen, width=facts.width, shared=facts.shared,
        normalised=facts.normalised, sigmoid=facts.sigmoid, groups=facts.groups, chosen_groups=facts.chosen_groups,
        group_best=facts.group_best, choice_bias=bias, weight_scale=facts.weight_scale,
        shared_gate=facts.shared > 0 and facts.shared_gate, wide_router=facts.wide_router,
        weighted_input=facts.weighted_input, gate=CGate(ACTIVATIONS[config.activation], gain, limit),
        router=packed(experts.router).weight, gate_up=gate_up, down=down,
    )  # fmt: skip
    found.kept = bias
    return found
