"""Unrolled forward of a head over whole documents: successive steps on its own outputs, with teacher forcing.

This is the training-time test of SafeAILab/EAGLE (form A): hidden states stay in their slots, while tokens and
positions advance by one each step. Legend: N slots, Ht hidden size of the target, H of the head.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from sametoken.learning.attention import UnrolledAttention
from sametoken.learning.batch import Batch
from sametoken.model.linear import Embedding


class Recurrent(Protocol):
    """Protocol of a head that reads its own last output in place of a feature.

    Attributes:
        embed: token embedding of the head, None if it uses the target's.
        recycles_normed: true if the next step reads `normed(output)` rather than the output.
    """

    embed: Embedding | None

    @property
    def recycles_normed(self) -> bool: ...

    def fuse(self, features: Tensor) -> Tensor:
        """Hidden input of the first step [N, H], from the target's features."""
        ...

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """RoPE values cos and sin at `positions` [N]."""
        ...

    def __call__(self, embedded: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor], attend: Any) -> Tensor:
        """Output [N, H] of one step, from token embeddings and hidden states [N, H]."""
        ...

    def normed(self, output: Tensor) -> Tensor:
        """Input of the output layer [N, H]."""
        ...


class Unrolled(NamedTuple):
    """Outputs of every step, for every slot.

    Attributes:
        normed: [K, N, H] inputs of the output head.
        recycled: [K, N, H] hidden inputs of the next step.
    """

    normed: Tensor
    recycled: Tensor


def unroll(
    head: Recurrent, vectors: Tensor, features: Tensor, batch: Batch, steps: int, *, recompute: bool = False
) -> Unrolled:
    """Run `steps` steps of a head.

    Args:
        vectors: [V, H] token embeddings of the head or the target.
        features: [N, ...] hidden states of the target that the head fuses.
        recompute: save no activations within a step, and run it again for the gradient.
    """
    attend = UnrolledAttention(batch.lengths)
    table = vectors if head.embed is None else head.embed.weight
    hidden = head.fuse(features)
    normed, recycled = [], []

    def step(index: int, hidden: Tensor) -> Tensor:
        attend.step = index
        rope = tuple(part.to(hidden.dtype) for part in head.rotation(batch.positions + index))
        embedded = F.embedding(batch.ahead(1 + index), table).to(hidden.dtype)
        output: Tensor = head(embedded, hidden, (rope[0], rope[1]), attend)
        return output

    for index in range(steps):
        output = checkpoint(step, index, hidden, use_reentrant=False) if recompute else step(index, hidden)
        normed.append(head.normed(output))
        # One norm serves both if the next step reads the normed output.
        hidden = normed[-1] if head.recycles_normed else output
        recycled.append(hidden)
    return Unrolled(torch.stack(normed), torch.stack(recycled))
