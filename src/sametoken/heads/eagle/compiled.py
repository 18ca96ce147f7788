"""EAGLE heads as one call of the compiled kernels, with the parts of the target that they share."""

from __future__ import annotations

from ctypes import pointer
from typing import cast

import torch
from torch import Tensor

from sametoken.heads.eagle.module import EagleHead, FirstBlock
from sametoken.kernels.cpu.library import Library
from sametoken.kernels.cpu.structures import Join, struct_of
from sametoken.kernels.cpu.variant import library
from sametoken.model.compiled import Compiled, Parts
from sametoken.model.compiled_layers import LANES, blocks_of, packed
from sametoken.model.decoder import Decoder
from sametoken.model.layers import RMSNorm
from sametoken.runtime.cache import KVCache, View


class NativeEagle(Compiled):
    """EAGLE head whose linears are packed for the kernels, with the shared parts of its target."""

    ahead = 1  # a slot reads the token after the slot's position

    def __init__(self, head: EagleHead, parts: Parts, kernels: Library) -> None:
        config, first, self._fc = head.config, parts.blocks[0], packed(head.fc)
        each = cast("list[RMSNorm]", [] if head.fc_norms is None else list(head.fc_norms))
        norms = {
            "whole_norm": None if head.input_norm is None else head.input_norm.weight.detach(),
            "part_norms": torch.cat([norm.weight.detach() for norm in each]) if each else None,
        }
        self._paired = not config.reads_last_state
        if self._paired:
            joint = cast("FirstBlock", first)
            norms["embed_norm"] = joint.embed_norm.weight.detach()
            norms["hidden_norm"] = joint.hidden_norm.weight.detach()
        elif head.embed_norm is not None and head.hidden_norm is not None:
            norms["embed_norm"] = head.embed_norm.weight.detach()
            norms["hidden_norm"] = head.hidden_norm.weight.detach()
        self._norms = norms  # targets of the structure's pointers
        join = struct_of(
            Join, fc=pointer(self._fc.weight), paired=self._paired, parts=len(config.taps),
            normed_residual=config.norm_before_residual, hidden_first=config.hidden_first, **norms,
        )  # fmt: skip
        super().__init__(parts, kernels, config.recycles_normed, pointer(join))

    @staticmethod
    def of(head: EagleHead, target: Decoder) -> NativeEagle | None:
        """Compiled form of a head and its target, None if the kernels are missing or do not support it."""
        kernels, output = library(), target.output_head if head.head is None else head.head
        if kernels is None or output is None:
            return None
        embed = target.embed if head.embed is None else head.embed
        ids = torch.arange(output.out_features) if head.head is None else head.draft_ids
        scale = target.config.logits_scale if head.head is None else 1.0
        parts = Parts(
            head.config.layers, blocks_of(head), lambda device, rope: head.rope_tables(device), embed, head.norm,
            output, ids, scale,
        )  # fmt: skip
        features = target.dtype == torch.bfloat16 and head.config.target_hidden_size % LANES == 0
        return NativeEagle(head, parts, kernels) if features and parts.fit(head.fc) else None

    def fuse(self, features: Tensor) -> Tensor:
        """Compute `EagleHead.fuse`."""
        return self._kernels.fuse(self._model, features, self._fc.nbytes) if self._paired else features

    def __call__(self, tokens: Tensor, hidden: Tensor, cache: KVCache, view: View) -> Tensor:
        """Run one step for the slots of `view`.

        Args:
            tokens: [T] tokens after the slots' positions.
            hidden: [T, H] fused features, or the recycled output of the previous step; finite for padding too.

        Returns:
            [T, H] output of the last block.
        """
        none = [None] * self._model.layers
        return self._run(tokens, hidden.clone(memory_format=torch.contiguous_format), cache, view, none)
