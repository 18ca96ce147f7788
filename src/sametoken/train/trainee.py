"""What a run trains: a batch and the target's hidden states in, a loss and figures out; here heads.

Everything that is trained happens inside `forward`, as wrappers for data parallelism and sharding require.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from sametoken.heads.eagle.module import EagleHead
from sametoken.heads.medusa.module import MedusaHeads
from sametoken.heads.write import write_head
from sametoken.learning.batch import Batch
from sametoken.learning.loss import AcceptanceMetrics, LossRule, Teacher, feature_loss, guess_loss
from sametoken.learning.target import Features, OuterLayers
from sametoken.learning.unroll import unroll
from sametoken.speculation.noise import uniform
from sametoken.train.heads import empty_head
from sametoken.train.settings import HeadSettings, LossSettings

TTT_STEPS = {"eagle3": 7, "eagle1": 1}


class Student(nn.Module, ABC):
    """What a run trains, beside its frozen target.

    Attributes:
        name: of the directory that the best one is kept in.
        steps: guesses in a row.
    """

    name: str
    steps: int

    @abstractmethod
    def forward(self, batch: Batch, features: Features, weights: Tensor) -> tuple[Tensor, AcceptanceMetrics]:
        """The weighted loss of a batch.

        Args:
            features: of its tokens: [N, taps * Ht] what an EAGLE head reads, for version 1 the last states, with noise
                or without; and [N, Ht] the last states.
            weights: [K, N] from `batch.guess_weights`, over the total.
        """

    def rewritten(self, batch: Batch, seeds: Tensor) -> Batch:
        """The batch that is trained on in place of one from the data.

        Args:
            seeds: int64 of each document, what its draws come from.
        """
        return batch

    @abstractmethod
    def write(self, place: Path, weights: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> None:
        """Writes whole weights, by their names in this module, as whoever serves them reads them.

        Args:
            dtype: of the files; None is bfloat16 if that is computed in, float32 otherwise.
        """


def computing_in(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[None]:
    """Within it matrices are multiplied in `dtype`."""
    if dtype == torch.float32:
        return nullcontext()
    # Weights are cast at each use: cached casts would add up the steps' gradients in the narrow dtype.
    return torch.autocast(device.type, dtype, cache_enabled=False)


def steps_of(head: HeadSettings, loss: LossSettings) -> int:
    """How many guesses in a row are trained: unrolled steps, or Medusa heads."""
    if not head.eagle:
        return head.medusa_num_heads
    return loss.ttt_steps or TTT_STEPS[head.method]


class Trainee(Student):
    """A head in training beside its frozen target.

    Args:
        head: in float32, its linears not packed.
        ends: of the target; none of its tensors is a parameter or a buffer here.
        settings: of the loss.
        steps: guesses in a row, from `steps_of`.
        dtype: what is computed in.
        recompute: compute activations again for the gradient instead of keeping them.
        target_name: for whoever reads the head's files.
    """

    name = "head"

    def __init__(
        self, head: EagleHead | MedusaHeads, outer: OuterLayers, settings: LossSettings, steps: int, dtype: torch.dtype,
        *, recompute: bool = False, target_name: str = "",
    ) -> None:  # fmt: skip
        super().__init__()
        self._target_name = target_name
        self.head, self.steps, self.dtype, self.recompute = head, steps, dtype, recompute
        self.outer, self.settings = outer, settings
        self.rule = LossRule(settings.loss, settings.mix, settings.skip_outside)
        ids = head.draft_ids if isinstance(head, EagleHead) else torch.arange(head.config.vocab_size)
        self.draft_ids = ids.to(outer.head.device)
        for parameter in head.parameters():
            parameter.requires_grad_(True)

    def forward(self, batch: Batch, features: Features, weights: Tensor) -> tuple[Tensor, AcceptanceMetrics]:
        teacher = Teacher(features.last, self.outer.head, batch.ahead(1), self.draft_ids)
        with computing_in(self.dtype, self.outer.head.device):
            if isinstance(self.head, MedusaHeads):
                return self._medusa(self.head, features, teacher, weights)
            return self._eagle(self.head, batch, features, teacher, weights)

    def _eagle(
        self, head: EagleHead, batch: Batch, features: Features, teacher: Teacher, weights: Tensor
    ) -> tuple[Tensor, AcceptanceMetrics]:
        read = features.taps.to(self.dtype)
        unrolled = unroll(head, self.outer.vectors, read, batch, self.steps, recompute=self.recompute)
        layer = self.outer.head if head.head is None else head.head.weight
        loss, report = guess_loss(unrolled.normed, [layer], teacher, weights, self.rule)
        if head.config.version == 3:
            return loss, report
        distance = feature_loss(unrolled.recycled, teacher.last, weights)
        return self.settings.guess_weight * loss + self.settings.feature_weight * distance, report

    def _medusa(
        self, heads: MedusaHeads, features: Features, teacher: Teacher, weights: Tensor
    ) -> tuple[Tensor, AcceptanceMetrics]:
        states = torch.stack(heads.states(features.last.to(self.dtype)))
        own = [head.head.weight for head in heads.each() if head.head is not None]
        return guess_loss(states, own or [self.outer.head], teacher, weights, self.rule)

    def write(self, place: Path, weights: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> None:
        whole = empty_head(self.head.config)
        whole.load_state_dict({name.removeprefix("head."): value for name, value in weights.items()})
        narrow = torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32
        write_head(whole, place, self.outer.config, target_name=self._target_name, dtype=dtype or narrow)


def with_noise(features: Tensor, batch: Batch, width: float, seeds: Tensor) -> Tensor:
    """Features [N, Ht] with uniform noise, less in documents of over 512 tokens, as SafeAILab/EAGLE trains EAGLE-1.

    There, shorter documents get more, which for a few dozen tokens is more than the features themselves.

    Args:
        seeds: int64 of each document; with a place in the document, all that its noise depends on.
    """
    channels = torch.arange(features.shape[1], device=features.device)
    random = uniform(seeds.to(features.device)[batch.documents], batch.positions, channels)
    scale = torch.tensor([width * 512 / max(length, 512) for length in batch.lengths], device=features.device)
    return features + ((random - 0.5) * scale[batch.documents].unsqueeze(1)).to(features.dtype)
