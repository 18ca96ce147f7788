"""EAGLE: a head of one or two blocks drafts from the target's hidden states, then from its own outputs.

Slot i reads the feature of position i and the token after it, and guesses the next token. Slots of committed tokens are
computed once, with features of the target, when the token after them is committed; slots computed from the head's own
outputs are discarded. Legend: B rows, N slots of a row, R rows of a product, H hidden size, W width of the taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import pointer
from typing import cast

import torch
from torch import Tensor

from sametoken.control.worth import Worth
from sametoken.drafters.rows import GrowingDrafter
from sametoken.heads.eagle.module import EagleHead, FirstBlock
from sametoken.kernels.cpu.library import Library
from sametoken.kernels.cpu.structures import Join, struct_of
from sametoken.kernels.cpu.variant import library
from sametoken.model.compiled import Compiled, Parts
from sametoken.model.compiled_guesses import Committed, Guesses, TreeBounds
from sametoken.model.compiled_layers import LANES, blocks_of, packed
from sametoken.model.decoder import Decoder, attend_in
from sametoken.model.layers import RMSNorm
from sametoken.runtime.cache import KVCache, Span, View
from sametoken.speculation.sampling import Sampling


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
        ids = torch.arange(output.out_features, device="cpu") if head.head is None else head.draft_ids
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


class EagleGuesser:
    """`drafters.growing.Guesser` of an EAGLE head and its target."""

    lag = 1

    def __init__(self, head: EagleHead, target: Decoder, cache: KVCache) -> None:
        self.head, self.target, self.cache = head, target, cache
        self.vocabulary = target.config.vocab_size
        reduced = head.config.draft_vocab_size < self.vocabulary
        self.ids = head.draft_ids.to(cache.keys.device) if reduced else None
        self._native = NativeEagle.of(head, target)

    def guess(self, read: Committed, limits: Sequence[int], sampling: Sampling, worth: Worth | None) -> Guesses | None:
        if self._native is None or sampling.edited or read.features is None:
            return None
        return self._native.guess(
            read._replace(features=self._normed(read.features)), self.cache, limits, sampling, worth
        )

    def branch(self, read: Committed, bounds: TreeBounds, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor] | None:
        if self._native is None or sampling.edited or read.features is None:
            return None
        return self._native.grow(read._replace(features=self._normed(read.features)), self.cache, bounds, sampling)

    def fuse(self, features: Tensor) -> Tensor:  # [R, W] -> [R, H]
        features = self._normed(features)
        return self.head.fuse(features) if self._native is None else self._native.fuse(features)

    def _normed(self, features: Tensor) -> Tensor:  # [R, W] -> [R, W]
        """Input of slots from the target's features: the normed last state (EAGLE-1) or unchanged taps (EAGLE-3)."""
        normed: Tensor = self.target.norm(features) if self.head.config.reads_last_state else features
        return normed

    def recycle(self, output: Tensor) -> Tensor:  # [R, H] -> [R, H]
        return self.head.recycle(output)

    def run(self, tokens: Tensor, hidden: Tensor | None, span: Span) -> Tensor:
        assert hidden is not None, "a slot reads a feature or the output of the slot before it"
        view, after = self.cache.view([span]), tokens.flatten()
        if self._native is not None:
            return self._native(after, hidden, self.cache, view).view(*tokens.shape, -1)
        embed = self.target.embed if self.head.embed is None else self.head.embed
        rope = self.head.rotation(view.positions)
        attend = attend_in(self.cache, view, scale=self.head.config.layers.attention_scale)
        output: Tensor = self.head(embed(after.clamp(min=0)), hidden, rope, attend)
        return output.view(*tokens.shape, -1)

    def scores(self, output: Tensor) -> Tensor:
        if self._native is not None:
            return self._native.logits(output)
        if self.head.head is None:
            return self.target.project(self.head.normed(output))
        return self.head.logits(output)


class EagleDrafter(GrowingDrafter):
    """Drafter with an EAGLE head whose KV cache shares the target's page table.

    Args:
        head: EAGLE head of any version; its token embedding and output layer may be the target's.
        target: model whose features the head reads.
        cache: KV cache of the head.
        max_draft_len, branches, budget: see `GrowingDrafter`.
    """

    namespace = "eagle"

    def __init__(
        self,
        head: EagleHead,
        target: Decoder,
        cache: KVCache,
        *,
        max_draft_len: int,
        branches: int = 1,
        budget: int | None = None,
    ) -> None:
        self.taps = head.config.taps or (target.config.num_layers - 1,)  # input of `_normed`
        branches = min(branches, head.config.draft_vocab_size)
        super().__init__(EagleGuesser(head, target, cache), max_draft_len, branches, budget)
