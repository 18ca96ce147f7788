"""Quantisation of a head's linear layers, with the errors of their outputs on hidden states of the target."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from sametoken.checkpoint.hub import read_config, stored_scheme
from sametoken.checkpoint.quantised.write import StoredFormat
from sametoken.errors import UnsupportedModelError
from sametoken.heads.kind import Head
from sametoken.heads.modules import linears, round_linears
from sametoken.heads.objective import HeadObjective
from sametoken.heads.read import read_head, stored_dtype
from sametoken.heads.registry import head_kind
from sametoken.heads.write import write_head
from sametoken.learning.batch import Batch, guess_weights
from sametoken.learning.target import Features
from sametoken.learning.training import Training
from sametoken.model.config import ModelConfig
from sametoken.quantise.run import Inputs, LayerError
from sametoken.train.targets import Source, read_outer, run


class HeadAndTarget(NamedTuple):
    """Directories of a head and of its target, with the target's name."""

    head: Path
    target: Path
    target_name: str


class _Watched:
    """`TrainedForm` that records the inputs of a layer and changes nothing."""

    def __init__(self) -> None:
        self.inputs = Inputs()

    def matrix(self, weight: Tensor) -> Tensor:
        return weight

    def rows(self, x: Tensor) -> Tensor:
        self.inputs.see(x.detach().flatten(0, -2))
        return x


def quantise_head(
    place: HeadAndTarget, stored: StoredFormat, documents: list[Tensor], output: Path
) -> list[LayerError]:
    """Write a quantised head and return the error of each layer.

    Weights are rounded like those of `train --quantize-aware`, independent of the documents.

    Args:
        place: head and target.
        stored: format.
        documents: token ids for the measurement of errors, int64 [S] each.
        output: directory, which is created.

    Raises:
        UnsupportedModelError: the head is already quantised, or the inputs of a layer do not divide into groups.
        CheckpointError: see `heads.read.read_head`.
        DraftMismatchError: see `heads.read.read_head`.
    """
    if (scheme := stored_scheme(place.head)) is not None:
        raise UnsupportedModelError(
            f"{place.head} is quantised already ({scheme.name}); expected plain weights, give the head that it was "
            "made from"
        )
    target = ModelConfig.from_hf(read_config(place.target))
    head = read_head(place.head, target, torch.float32, "cpu", pack=False).module
    weights = {name: linear.weight.detach() for name, linear in linears(head).items()}
    seen = _calibrated(head, place, target, documents)
    round_linears(head, stored.rounding)
    write_head(head, output, target, target_name=place.target_name, dtype=stored_dtype(place.head), stored=stored)
    return [LayerError(name, _error(seen[name], weights[name], head, name)) for name in weights]


def _error(seen: Inputs, weight: Tensor, head: Head, name: str) -> float | None:
    coded = linears(head)[name].coded
    found = None if coded is None else seen.error(weight, coded)
    if found is None:
        return None
    wrong, whole = found.sum(0).tolist()
    return float((wrong / whole) ** 0.5) if whole else 0.0


@torch.no_grad()
def _calibrated(head: Head, place: HeadAndTarget, target: ModelConfig, documents: list[Tensor]) -> dict[str, Inputs]:
    """Inputs of each layer of the unrolled head; without rows for kinds that cannot be trained."""
    watched = {name: _Watched() for name in linears(head)}
    kind = head_kind(head.config).kind
    if kind.objective:
        training: Training = kind.load(kind.objective)
        made: type[HeadObjective] = kind.load(training.objective)
        outer = read_outer(place.target, torch.float32, torch.device("cpu"))
        objective = made(head, outer, training.loss(), torch.float32, target_name=place.target_name)
        for name, linear in linears(head).items():
            linear.trained = watched[name]
        dtype = torch.bfloat16 if target.dtype == "bfloat16" else torch.float32  # data type of serving
        source = run(place.target, objective.taps, max(map(len, documents)), dtype, torch.device("cpu"))
        for ids in documents:
            _forward(objective, source, ids)
        for linear in linears(head).values():
            linear.trained = None
    return {name: each.inputs for name, each in watched.items()}


def _forward(objective: HeadObjective, source: Source, ids: Tensor) -> None:
    batch = Batch.of([(ids, ids >= 0)])
    weighed = guess_weights(batch, objective.steps, 1.0, per_document=True)
    objective(batch, Features(*(part.to(torch.float32) for part in source(0, ids))), weighed.weights)
