"""Cost of quantising a model: errors of its layers, loss on held-out text, acceptance of a draft, bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sametoken.errors import DataError
from sametoken.quantise.run import LayerError
from sametoken.train.evaluate import Asked, Evaluation, Question, evaluate, open_llm

REPORT = "quantization_report.json"
WORST = 5  # number of printed layers


@dataclass(frozen=True)
class DraftAcceptance:
    """Acceptance length of a draft on the held-out prompts, before and after quantisation of target or draft."""

    draft: str
    before: float
    after: float
    prompts: int
    max_draft_len: int
    tokens: int

    def line(self) -> str:
        """Printed line."""
        return (
            f"acceptance length of {self.draft} on {self.prompts} held-out prompts: "
            f"{self.before:.3f} -> {self.after:.3f}"
        )


@dataclass(frozen=True)
class Report:
    """Cost of quantising a model.

    Attributes:
        model: quantised model.
        format: format of the weights.
        group: inputs that share a scale; None for one scale per row.
        data: source of the documents.
        calibration_documents: number of documents for calibration.
        calibration_tokens: number of their tokens.
        held_out_documents: number of documents for evaluation.
        held_out_tokens: number of their tokens.
        loss_before: mean negative log-likelihood of the held-out tokens before quantisation, in nats.
        loss_after: mean negative log-likelihood after it.
        bytes_before: size of the weight files before it.
        bytes_after: size of the weight files after it.
        seconds: duration.
        layers: relative error of each layer's outputs on calibration inputs.
        acceptance: acceptance of a draft; None without a draft.
    """

    model: str
    format: str
    group: int | None
    data: str
    calibration_documents: int
    calibration_tokens: int
    held_out_documents: int
    held_out_tokens: int
    loss_before: float
    loss_after: float
    bytes_before: int
    bytes_after: int
    seconds: float
    layers: list[LayerError]
    acceptance: DraftAcceptance | None = None

    def to_json(self) -> dict[str, Any]:
        """Content of the report file."""
        return {**asdict(self), "layers": [each._asdict() for each in self.layers]}

    def lines(self) -> list[str]:
        """Printed lines."""
        return [
            _size(self.format, self.bytes_before, self.bytes_after),
            f"calibrated with {self.calibration_tokens} tokens, {self.calibration_documents} documents of {self.data}",
            *_errors(self.layers),
            f"loss on {self.held_out_tokens} held-out tokens: {self.loss_before:.4f} -> {self.loss_after:.4f}",
            *([] if self.acceptance is None else [self.acceptance.line()]),
        ]


@dataclass(frozen=True)
class HeadReport:
    """Cost of quantising a head; fields as in `Report`, with the acceptance of the head before and after."""

    model: str
    target: str
    format: str
    group: int | None
    data: str
    calibration_documents: int
    calibration_tokens: int
    bytes_before: int
    bytes_after: int
    seconds: float
    layers: list[LayerError]
    acceptance: DraftAcceptance

    def to_json(self) -> dict[str, Any]:
        """Content of the report file."""
        return {**asdict(self), "layers": [each._asdict() for each in self.layers]}

    def lines(self) -> list[str]:
        """Printed lines."""
        return [
            _size(self.format, self.bytes_before, self.bytes_after),
            f"errors measured with {self.calibration_tokens} tokens, {self.calibration_documents} documents of "
            f"{self.data}",
            *_errors(self.layers),
            self.acceptance.line(),
        ]


def _size(format: str, before: int, after: int) -> str:
    return f"{format}: {before / 1e6:.1f} MB -> {after / 1e6:.1f} MB of weights"


def _errors(layers: Sequence[LayerError]) -> Iterator[str]:
    errors = sorted((each.error, each.module) for each in layers if each.error is not None)
    mean = sum(error for error, _ in errors) / max(len(errors), 1)
    yield f"relative error of a layer's outputs: {mean:.4f} on average; the greatest:"
    yield from (f"  {error:.4f}  {module}" for error, module in reversed(errors[-WORST:]))
    if unseen := len(layers) - len(errors):
        yield f"{unseen} layers were reached by no calibration token, and are rounded without one"


def accepted(target: str | Path, draft: str, prompts: list[list[int]], asked: Asked) -> Evaluation:
    """Measure a draft on the prompts that fit into the context.

    Raises:
        DataError: no prompt fits.
        SametokenError: the draft does not belong to the target.
    """
    llm = open_llm(str(target), draft, asked)
    fitting = [Question(ids, "") for ids in prompts if len(ids) + asked.tokens <= llm.max_seq_len]
    if not fitting:
        raise DataError(
            f"no held-out prompt fits into {llm.max_seq_len} positions with {asked.tokens} tokens of answer"
        )
    return evaluate(llm, fitting, asked)
