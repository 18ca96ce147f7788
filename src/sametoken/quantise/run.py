"""Quantisation of a model block by block: read, calibrate, round, write, release.

Hidden states of the plain model pass through the plain blocks, for calibration and for the loss on held-out documents;
those of the quantised model pass through the rounded blocks. No model is in memory as a whole.
`Inputs` has mean squares, greatest magnitude and some rows of the inputs of a linear layer.
Legend: S tokens of a batch, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sametoken.checkpoint.tensors import Stored
from sametoken.errors import UnsupportedModelError
from sametoken.learning.attention import UnrolledAttention
from sametoken.learning.batch import Batch
from sametoken.model.block import Block
from sametoken.model.decoder import Decoder
from sametoken.model.formats.coded import Coded
from sametoken.model.formats.rounding import ROUNDINGS, Rounding
from sametoken.model.linear import Linear
from sametoken.quantise.documents import Documents
from sametoken.quantise.source import OUTER, PlainCheckpoint

ROWS = 512  # most recorded rows of a layer, for the measurement of its error
PER_CALL = 64  # most recorded rows of one call
BATCH = 2048  # most tokens of a batch, unless a document is longer
LOGITS = 128  # rows of logits computed at once


class Inputs:
    """Inputs of one linear layer over several calls.

    Attributes:
        peak: greatest magnitude of an input.
    """

    def __init__(self) -> None:
        self._squares: Tensor | None = None
        self._count = 0
        self._rows: list[Tensor] = []
        self.peak = 0.0

    def see(self, x: Tensor) -> None:
        """Add input rows `x` [M, in]."""
        wide = x.to(torch.float32)
        squares = wide.square().sum(0)
        self._squares = squares if self._squares is None else self._squares + squares
        self._count += len(x)
        self.peak = max(self.peak, float(wide.abs().amax()))
        if (left := ROWS - sum(map(len, self._rows))) > 0:
            self._rows.append(x[:: -(-len(x) // PER_CALL)][:left].clone())

    @property
    def importance(self) -> Tensor | None:
        """Mean squares of the inputs, [in], at least a thousandth of their mean; None without inputs."""
        if self._squares is None:
            return None
        mean = self._squares / self._count
        return mean.clamp(min=float(mean.mean()) / 1000 or 1.0)

    def error(self, weight: Tensor, rounded: Coded) -> Tensor | None:
        """Sums of squares over the recorded rows, of the error of each output and of the output, [out, 2].

        None without rows.

        Args:
            weight: original weight [out, in].
            rounded: quantised weight.
        """
        if not self._rows:
            return None
        rows = torch.cat(self._rows).to(torch.float32)
        meant = rows @ weight.to(torch.float32).t()
        found = rounded.linear(rows).to(torch.float32)
        return torch.stack([(found - meant).square().sum(0), meant.square().sum(0)], 1)


def linears(block: Block) -> dict[str, Linear]:
    """Linear layers of a block that can be quantised, by name: all except routers of experts."""
    return {
        name: module
        for name, module in block.named_modules()
        if isinstance(module, Linear) and not name.endswith("router")
    }


@contextmanager
def watching(modules: dict[str, Linear]) -> Iterator[dict[str, Inputs]]:
    """Record the inputs of modules inside the `with` statement."""
    seen = {name: Inputs() for name in modules}

    def hook(name: str) -> Any:
        def see(module: nn.Module, given: tuple[Tensor, ...]) -> None:
            seen[name].see(given[0])

        return see

    handles = [module.register_forward_pre_hook(hook(name)) for name, module in modules.items()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


class Sink(Protocol):
    """Destination of the tensors of a checkpoint.

    Attributes:
        rounds_outer: true if embeddings and lm_head are quantised too.
    """

    rounds_outer: bool

    def add(self, name: str, value: Tensor | Coded, peak: float = 0.0) -> None:
        """Add a tensor.

        Args:
            name: name of the tensor in a Hugging Face checkpoint.
            value: tensor or quantised weight.
            peak: greatest input magnitude of a quantised weight.
        """
        ...


class LayerError(NamedTuple):
    """Quantised layer and the relative error of its outputs; None if no token reached the layer."""

    module: str
    error: float | None


class RoundingCost(NamedTuple):
    """Cost of quantisation.

    Attributes:
        layers: quantised layers in order of the blocks.
        before: mean negative log-likelihood of the held-out tokens before it, in nats.
        after: mean negative log-likelihood after it.
    """

    layers: list[LayerError]
    before: float
    after: float


class _Stream:
    """Batches of documents and their hidden states [S, H]."""

    def __init__(self, documents: Sequence[Tensor], vectors: Tensor, shapes: Decoder) -> None:
        self._shapes = shapes
        self.batches = [Batch.of([(ids, ids >= 0) for ids in group]) for group in _groups(documents)]
        self.states = [shapes.scaled(F.embedding(batch.tokens, vectors)) for batch in self.batches]

    def go(self, block: Block) -> None:
        for i, batch in enumerate(self.batches):
            rope = self._shapes.rotations(batch.positions)[block.layer]
            attend = UnrolledAttention(batch.lengths, self._shapes.config.attention_scale)
            self.states[i] = block(self.states[i], rope, attend)

    def loss(self, norm: Callable[[Tensor], Tensor], head: Tensor) -> float:
        """Mean negative log-likelihood of each token after the first of its document."""
        total, count = 0.0, 0
        for batch, states in zip(self.batches, self.states, strict=True):
            documents = batch.documents
            places = (documents[1:] == documents[:-1]).nonzero()[:, 0]
            for part in torch.split(places, LOGITS):
                logits = F.linear(norm(states[part]), head).to(torch.float32) * self._shapes.config.logits_scale
                total += float(F.cross_entropy(logits, batch.tokens[part + 1], reduction="sum"))
            count += len(places)
        return total / count


def _groups(documents: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    group: list[Tensor] = []
    for ids in documents:
        if group and sum(map(len, group)) + len(ids) > BATCH:
            yield group
            group = []
        group.append(ids)
    yield group


@torch.no_grad()
def quantise(
    source: PlainCheckpoint,
    rounding: Rounding,
    documents: Documents,
    sink: Sink,
    progress: Callable[[], None] = lambda: None,
) -> RoundingCost:
    """Quantise the linear layers of a checkpoint block by block, and measure the cost.

    Args:
        source: checkpoint.
        rounding: rounding of a weight.
        documents: documents for calibration and evaluation.
        sink: destination of all tensors.
        progress: function to call after each block.

    Raises:
        CheckpointError: the weights do not fit the configuration.
        UnsupportedModelError: the inputs of a layer do not divide into groups.
    """
    with torch.device("meta"):
        shapes = Decoder(source.config, source.dtype)
    vectors = source.outer("embed.weight")
    rounded = _rounded_outer(vectors) if sink.rounds_outer else None
    calibrated = _Stream(documents.calibration, vectors, shapes)
    before = _Stream(documents.held_out, vectors, shapes)
    after = _Stream(documents.held_out, vectors if rounded is None else _plain(rounded, source.dtype), shapes)
    del vectors
    layers: list[LayerError] = []
    for number in range(source.config.num_layers):
        stored = list(source.stored(number))
        block = source.block(number, stored)
        found = linears(block)
        with watching(found) as inputs:
            calibrated.go(block)
        before.go(block)
        codes = {}
        for name, linear in found.items():
            codes[f"blocks.{number}.{name}.weight"] = _round(rounding, linear, inputs[name], f"block {number} {name}")
        layers += _add(source, stored, codes, sink)
        after.go(block)
        progress()
    norm = shapes.norm
    norm.weight = torch.nn.Parameter(source.outer("norm.weight"), requires_grad=False)
    for item in source.stored(OUTER):
        _add_outer(source, item, sink)
    head = source.outer("embed.weight" if source.config.tie_word_embeddings else "head.weight")
    lost = before.loss(norm, head)
    if sink.rounds_outer:
        head = _plain(_rounded_outer(head), source.dtype)
    return RoundingCost(layers, lost, after.loss(norm, head))


class _Rounded(NamedTuple):
    weight: Coded
    errors: Tensor | None  # [out, 2], see `Inputs.error`
    peak: float


def _round(rounding: Rounding, linear: Linear, inputs: Inputs, name: str) -> _Rounded:
    """Quantise the weight of a layer; from now on the layer computes with the quantised weight."""
    weight = linear.weight.detach()
    try:
        code = rounding(weight, inputs.importance)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{name} has {error}; choose another format or --group-size") from error
    errors = inputs.error(weight, code)
    if code.dynamic:  # inputs are quantised too
        linear.coded = code
    else:
        weight.copy_(code.dequantize())
    return _Rounded(code, errors, inputs.peak)


def _plain(code: Coded, dtype: torch.dtype) -> Tensor:
    return code.dequantize().to(dtype)


def _add(
    source: PlainCheckpoint, stored: Sequence[Stored], codes: dict[str, _Rounded], sink: Sink
) -> Iterator[LayerError]:
    """Add the tensors of a block to the sink, quantised or unchanged; yield the errors of quantised layers."""
    for item in stored:
        place = source.rules.place(item.name)
        found = None if place is None else codes.get(place.parameter)
        if place is None or found is None:
            sink.add(item.name, item.tensor)
            continue
        rows = slice(None) if place.rows is None else slice(place.rows.start, place.rows.stop)
        index = torch.arange(found.weight.shape[0])[rows]
        sink.add(item.name, found.weight if place.rows is None else found.weight.outputs(index), found.peak)
        error = None
        if found.errors is not None:
            wrong, whole = found.errors[rows].sum(0).tolist()
            error = (wrong / whole) ** 0.5 if whole else 0.0
        yield LayerError(item.name.removesuffix(".weight"), error)


def _rounded_outer(weight: Tensor) -> Coded:
    """Embeddings or lm_head with eight bits."""
    return ROUNDINGS["gguf-q8_0"](weight)


def _add_outer(source: PlainCheckpoint, item: Stored, sink: Sink) -> None:
    if sink.rounds_outer and item.tensor.dim() == 2 and not source.rules.ignores(item.name):
        sink.add(item.name, _rounded_outer(item.tensor))
    else:
        sink.add(item.name, item.tensor)
