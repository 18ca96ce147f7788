"""Training objective: a batch and the target's hidden states in, a loss and acceptance metrics out.

Everything that is trained happens inside `forward`, as wrappers for data parallelism and sharding require.
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

STD = 0.02  # of random weights, as transformers initialises linears


class Start(NamedTuple):
    """Inputs from which a draft to train is built.

    Attributes:
        kind: name of its kind of drafter. `head`, `loss`: settings of the draft and of the loss.
        outer: of the target, and `directory` its checkpoint; `target_name`: for whoever reads the draft's files.
        draft_ids: int64 [Vd] ids that the draft can guess, ascending; None for all.
        dtype: what is computed in. `seed`: of the first weights.
        recompute: compute activations again for the gradient instead of keeping them.
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
    """A draft in training beside its frozen target.

    Attributes:
        steps: guesses in a row that are trained.
        taps: blocks of the target whose outputs it reads besides the last states, 0-based; () for none.
        dtype: what is computed in. `recompute`: activations are computed again for the gradient.
        outer: of the target; none of its tensors is a parameter or a buffer here.
        settings: of the loss; `rule`: what they say of one guess.
        draws: `forward` draws random numbers where a batch has seeds.
        stored: what the linear layers are rounded to in training and in files, None for nothing.
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
        """A draft with fresh weights, or with those that the settings name.

        Raises:
            ConfigError: the settings contradict each other or the target.
            CheckpointError: the draft to start from cannot be read.
            DraftMismatchError: it belongs to another target.
        """

    @abstractmethod
    def forward(self, batch: Batch, features: Features, weights: Tensor) -> tuple[Tensor, AcceptanceMetrics]:
        """The weighted loss of a batch.

        Args:
            features: of its N tokens.
            weights: [K, N] from `batch.guess_weights`, over the total.
        """

    def rewritten(self, batch: Batch) -> Batch:
        """The batch that is trained on in place of one from the data."""
        return batch

    @abstractmethod
    def write(self, place: Path, weights: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> None:
        """Write whole weights, by their names in this module, as whoever serves them reads them.

        Args:
            dtype: of the files; None is bfloat16 if that is computed in, float32 otherwise.
        """

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype of files where none is asked for."""
        return torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32


def computing_in(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[None]:
    """Within it matrices are multiplied in `dtype`."""
    if dtype == torch.float32:
        return nullcontext()
    # Weights are cast at each use: cached casts would add up the steps' gradients in the narrow dtype.
    return torch.autocast(device.type, dtype, cache_enabled=False)
