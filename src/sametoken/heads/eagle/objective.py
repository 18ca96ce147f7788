"""Common training objective of EAGLE heads: unrolled on their own outputs, with a loss at every step."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from sametoken.errors import ConfigError
from sametoken.heads.eagle.module import EagleHead
from sametoken.heads.kind import Head
from sametoken.heads.objective import HeadObjective
from sametoken.learning.batch import Batch
from sametoken.learning.loss import AcceptanceMetrics, Teacher, guess_loss
from sametoken.learning.objective import STD, Start
from sametoken.learning.target import Features
from sametoken.learning.unroll import Unrolled, unroll


class EagleObjective(HeadObjective):
    """Training objective of an EAGLE head: the loss of the guesses at every step of the unrolled forward.

    Attributes:
        STEPS: default number of unrolled steps.
    """

    STEPS: int

    @property
    def steps(self) -> int:  # type: ignore[override]
        return self.settings.ttt_steps or self.STEPS

    @classmethod
    def first_weights(cls, head: Head, target_head: Tensor, generator: torch.Generator, std: float = STD) -> None:
        """Initialise weights as for every head, and copy the target's output layer if it has the head's width."""
        super().first_weights(head, target_head, generator, std)
        assert isinstance(head, EagleHead)
        if head.head is not None and target_head.shape[1] == head.config.layers.hidden_size:
            head.head.weight.data.copy_(target_head[head.draft_ids.to(target_head.device)])

    @classmethod
    def compare(cls, head: EagleHead, start: Start) -> None:
        ids, origin = start.draft_ids, start.head.init_from
        if ids is not None and not torch.equal(head.draft_ids.cpu(), ids):
            raise ConfigError(
                f"--init-from {origin} guesses among {len(head.d2t)} tokens, the data's draft vocabulary has "
                f"{len(ids)}, and they differ; prepare the data without --draft-vocab-size to keep the head's"
            )

    @abstractmethod
    def read_states(self, features: Features, batch: Batch) -> Tensor:
        """Hidden states [N, ...] of the target that the first step fuses."""

    def minimised(
        self, batch: Batch, features: Features, teacher: Teacher, weights: Tensor
    ) -> tuple[Tensor, AcceptanceMetrics]:
        read = self.read_states(features, batch).to(self.dtype)
        unrolled = unroll(self.head, self.outer.vectors, read, batch, self.steps, recompute=self.recompute)
        own, states = self.head.head, unrolled.normed
        layer, states = (self.outer.head, states) if own is None else (own.matrix, own.rows(states))
        loss, metrics = guess_loss(states, [layer], teacher, weights, self.rule)
        return self.combined(loss, unrolled, teacher, weights), metrics

    def combined(self, loss: Tensor, unrolled: Unrolled, teacher: Teacher, weights: Tensor) -> Tensor:
        """Loss plus further terms of the version."""
        return loss
