"""State of decoding rows in tensors that a captured step reads and writes in place.

A graph slot is a place in a batch of fixed size, for one row of the page table. Slots without a row are padding and
never advance. Legend: B graph slots, N nodes of a slot's draft, K tokens of its longest path, W width of the features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sametoken.runtime.transfer import upload


class Latest(NamedTuple):
    """Last tokens that every graph slot emitted, at most `width` of them.

    Attributes:
        tokens: [B, width], the pending token at `counts - 1`; undefined after it.
        features: [B, width, W] of the positions before those of the tokens.
        counts: [B] number of tokens, at least 1.
    """

    tokens: Tensor
    features: Tensor
    counts: Tensor


@dataclass(frozen=True, slots=True)
class GraphSlots:
    """State of the graph slots. All fields but the features are int64.

    Attributes:
        rows: [B] row of the page table.
        lengths: [B] number of committed tokens, at least 1.
        limits: [B] longest draft that a request allows.
        room: [B] tokens that may still be emitted.
        active: [B] 1, or 0 for padding.
        tokens: [B, K + 1] tokens of the latest step, the last one pending.
        counts: [B] number of these tokens.
        features: [B, K + 1, W] hidden states of the positions before these tokens, for drafters.
        emitted: [B, 1 + K + 1 + N - 1] report of the latest step to the host: number of tokens, the tokens, and the
            depth of every verified draft token, 0 for padding.
    """

    rows: Tensor
    lengths: Tensor
    limits: Tensor
    room: Tensor
    active: Tensor
    tokens: Tensor
    counts: Tensor
    features: Tensor
    emitted: Tensor

    @classmethod
    def empty(
        cls, batch: int, depth: int, nodes: int, device: torch.device, width: int = 0, dtype: torch.dtype | None = None
    ) -> GraphSlots:
        """State without rows, for drafts of `nodes` nodes, K = `depth`, and features of `dtype`, W = `width`."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int64, device=device)

        return cls(
            rows=zeros(batch), lengths=zeros(batch), limits=zeros(batch), room=zeros(batch), active=zeros(batch),
            tokens=zeros(batch, depth + 1), counts=torch.ones_like(zeros(batch)),
            features=torch.zeros(batch, depth + 1, width, dtype=dtype, device=device),
            emitted=zeros(batch, 1 + depth + nodes),
        )  # fmt: skip

    @property
    def batch(self) -> int:
        return self.rows.shape[0]

    @property
    def state(self) -> tuple[Tensor, ...]:
        """Tensors that a step changes and the next one reads."""
        return self.lengths, self.room, self.tokens, self.counts, self.features

    @property
    def longest(self) -> Tensor:
        """Longest useful draft [B]: with the target's own token, it fills the room."""
        return self.limits.minimum(self.room - 1).clamp(min=0)

    @property
    def pending(self) -> Tensor:
        """Newest token [B]."""
        return self.tokens.gather(1, self.counts.unsqueeze(1) - 1).squeeze(1)

    def latest(self, width: int) -> Latest:
        """Last `width` tokens of each slot, fewer if fewer were emitted."""
        last = self.tokens.shape[1] - 1
        if width > last:
            return Latest(self.tokens, self.features, self.counts)
        counts = self.counts.clamp(max=width)
        at = (self.counts - counts).unsqueeze(1) + torch.arange(width, device=counts.device)
        at = at.clamp(max=last)
        features = self.features.gather(1, at.unsqueeze(2).expand(-1, -1, self.features.shape[2]))
        return Latest(self.tokens.gather(1, at), features, counts)

    def load(
        self, rows: Sequence[int], pending: Sequence[int], spare: int, lengths: Sequence[int], limits: Sequence[int],
        room: Sequence[int], features: Sequence[Tensor | None] = (),
    ) -> None:  # fmt: skip
        """Put rows into the first graph slots."""
        pads = self.batch - len(rows)
        for field, values, padding in (
            (self.rows, rows, spare),
            (self.lengths, lengths, 1),
            (self.limits, limits, 0),
            (self.room, room, 1),
            (self.active, [1] * len(rows), 0),
            (self.tokens[:, 0], pending, 0),
            (self.counts, [1] * len(rows), 1),
        ):
            field.copy_(upload([*values, *[padding] * pads], field.device))
        for slot, feature in enumerate(features):
            if feature is not None:
                self.features[slot, :1] = feature

    def committed_features(self) -> list[Tensor]:
        """Copies of the features [count, W] that the latest step committed, by slot; synchronises with the device."""
        return [features[:count].clone() for features, count in zip(self.features, self.counts.tolist(), strict=True)]
