"""Training objective: from a batch and the target's hidden states to a loss and acceptance metrics.

All computations on trained parameters are inside `forward`, as wrappers for data parallelism and sharding require.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from sametoken.checkpoint.quantised.write import StoredFormat
from sametoken.learning.batch import Batch
from sametoken.learning.loss import AcceptanceMetrics, LossRule
from sametoken.learning.target import Features, OuterLayers

STD = 0.02  # of random weights, as for linears in transformers


class Start(NamedTuple):
    """Inputs for the construction of a draft to train.

    Attributes:
        kind: name of the kind of drafter.
        head, loss: settings of the draft and of the loss.
        outer: outer layers of the target.
        directory: checkpoint of the target.
        target_name: name of the target for readers of the draft's files.
        draft_ids: int64 [Vd] ascending ids that the draft can guess; None for all.
        dtype: dtype of computations.
        seed: seed of the initial weights.
        recompute: recompute activations for the gradient instead of saving them.
    """

    kind: str
    head: Any
    loss: Any
    outer: OuterLayers
    directory: Path
    target_name: str
    draft_ids: Tensor | None
    dtype: torch.dtype
    seed: int
    recompute: bool


class Objective(nn.Module, ABC):
    """Draft in training on a frozen target.

    Attributes:
        steps: number of successive guesses that are trained.
        taps: 0-based blocks of the target whose outputs are read in addition to the last states; () for none.
        dtype: dtype of computations.
        recompute: true if activations are recomputed for the gradient.
        outer: outer layers of the target, whose tensors are neither parameters nor buffers of this module.
        settings: settings of the loss.
        rule: loss of a guess, from the settings.
        draws: true if `forward` draws random numbers for batches with seeds.
        stored: format of the linear layers in training and in files, None for plain ones.
    """

    steps: int
    taps: tuple[int, ...] = ()
    draws: bool = False
    stored: StoredFormat | None = None

    def __init__(self, outer: OuterLayers, loss: Any, dtype: torch.dtype, *, recompute: bool = False) -> None:
        super().__init__()
        self.outer, self.settings, self.dtype, self.recompute = outer, loss, dtype, recompute
        self.rule = LossRule(loss.loss, loss.mix, loss.skip_outside)

    @classmethod
    @abstractmethod
    def new(cls, start: Start) -> Self:
        """Create a draft with initial weights, or with those that the settings name.

        Raises:
            ConfigError: the settings contradict each other or the target.
            CheckpointError: the initial draft cannot be read.
            DraftMismatchError: the initial draft belongs to another target.
        """

    @abstractmethod
    def forward(self, batch: Batch, features: Features, weights: Tensor) -> tuple[Tensor, AcceptanceMetrics]:
        """Weighted loss and metrics of a batch.

        Args:
            features: features of the N tokens.
            weights: [K, N] weights of `batch.guess_weights`, divided by the total.
        """

    def rewritten(self, batch: Batch) -> Batch:
        """Batch to train on in place of a batch from the data."""
        return batch

    @abstractmethod
    def write(self, place: Path, weights: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> None:
        """Write whole weights, given by their names in this module, in the format for serving.

        Args:
            dtype: dtype of the files; None for bfloat16 if it is the dtype of computations, otherwise float32.
        """

    @property
    def stored_dtype(self) -> torch.dtype:
        """Default dtype of files."""
        return torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32


def computing_in(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[None]:
    """Context in which matrices are multiplied in `dtype`."""
    if dtype == torch.float32:
        return nullcontext()
    # Weights are cast at each use: with cached casts, gradients of all steps would be added in the narrow dtype.
    return torch.autocast(device.type, dtype, cache_enabled=False)
