"""A head run over whole documents as a draft runs it: step after step on its own outputs, tokens given.

This is training-time test as SafeAILab/EAGLE describes it (form A): hidden states stay in their slots, tokens and
positions move on by one each step. Legend: N slots, Ht hidden size of the target, H of the head.
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
    """A head that reads its own last output in place of a feature.

    Attributes:
        embed: its own token vectors, None where it reads the target's.
        recycles_normed: whether the next step reads `normed(output)` rather than the output itself.
    """

    embed: Embedding | None

    @property
    def recycles_normed(self) -> bool: ...

    def fuse(self, features: Tensor) -> Tensor:
        """Hidden input of the first step [N, H], from the target's features."""
        ...

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin at `positions` [N]."""
        ...

    def __call__(self, embedded: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor], attend: Any) -> Tensor:
        """One step [N, H] from token vectors and hidden states [N, H]."""
        ...

    def normed(self, output: Tensor) -> Tensor:
        """Input of the output layer [N, H]."""
        ...


class Unrolled(NamedTuple):
    """Outputs of every step, for every slot.

    Attributes:
        normed: [K, N, H] what an output head reads.
        recycled: [K, N, H] what the next step would read.
    """

    normed: Tensor
    recycled: Tensor


def unroll(
    head: Recurrent, vectors: Tensor, features: Tensor, batch: Batch, steps: int, *, recompute: bool = False
) -> Unrolled:
    """Run `steps` steps of a head.

    Args:
        vectors: [V, H] token vectors: the head's own, or the target's.
        features: [N, ...] the target's hidden states that the head fuses.
        recompute: keep no activations within a step but run it again for the gradient.
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
        # One norm serves both where the next step reads the normed output.
        hidden = normed[-1] if head.recycles_normed else output
        recycled.append(hidden)
    return Unrolled(torch.stack(normed), torch.stack(recycled))
