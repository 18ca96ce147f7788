"""What quantising a model cost: errors of its layers, loss on held-out text, acceptance of a draft, bytes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sametoken.errors import DataError
from sametoken.quantise.run import LayerError
from sametoken.train.evaluate import Asked, Evaluation, Question, evaluate, open_llm

REPORT = "quantization_report.json"
WORST = 5  # layers that are printed


@dataclass(frozen=True)
class DraftAcceptance:
    """Acceptance length of a draft on the held-out prompts, with the plain and with the quantised target."""

    draft: str
    before: float
    after: float
    prompts: int
    max_draft_len: int
    tokens: int


@dataclass(frozen=True)
class Report:
    """All of it.

    Attributes:
        model, format, group: what was rounded to what; the group is None where rows have one scale.
        data: where the documents are from.
        calibration_documents, calibration_tokens, held_out_documents, held_out_tokens: how many.
        loss_before, loss_after: mean negative log-likelihood of the held-out tokens, in nats.
        bytes_before, bytes_after: of the weight files.
        layers: relative error of each layer's outputs on calibration inputs.
        acceptance: None where no draft was given.
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
        """The content of the report's file."""
        return {**asdict(self), "layers": [each._asdict() for each in self.layers]}

    def lines(self) -> list[str]:
        """The same for people."""
        errors = sorted((each.error, each.module) for each in self.layers if each.error is not None)
        unseen = len(self.layers) - len(errors)
        mean = sum(error for error, _ in errors) / max(len(errors), 1)
        found = [
            f"{self.format}: {self.bytes_before / 1e6:.1f} MB -> {self.bytes_after / 1e6:.1f} MB of weights",
            f"calibrated with {self.calibration_tokens} tokens, {self.calibration_documents} documents of {self.data}",
            f"relative error of a layer's outputs: {mean:.4f} on average; the greatest:",
            *(f"  {error:.4f}  {module}" for error, module in reversed(errors[-WORST:])),
            *([f"{unseen} layers were reached by no calibration token, and are rounded without one"] if unseen else []),
            f"loss on {self.held_out_tokens} held-out tokens: {self.loss_before:.4f} -> {self.loss_after:.4f}",
        ]
        if (accepted := self.acceptance) is not None:
            found.append(
                f"acceptance length of {accepted.draft} on {accepted.prompts} held-out prompts: "
                f"{accepted.before:.3f} -> {accepted.after:.3f}"
            )
        return found


def accepted(target: str | Path, draft: str, prompts: list[list[int]], asked: Asked) -> Evaluation:
    """What a draft does on the prompts that fit the context.

    Raises:
        DataError: none fits. SametokenError: the draft is not made for the target.
    """
    llm = open_llm(str(target), draft, asked)
    fitting = [Question(ids, "") for ids in prompts if len(ids) + asked.tokens <= llm.max_seq_len]
    if not fitting:
        raise DataError(
            f"no held-out prompt fits into {llm.max_seq_len} positions with {asked.tokens} tokens of answer"
        )
    return evaluate(llm, fitting, asked)
