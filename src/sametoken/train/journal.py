"""Log of a run: metrics since its last entry, one line of JSON per event, TensorBoard, and a picture of the curves."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sametoken.errors import ConfigError, DataError
from sametoken.files import replacing
from sametoken.learning.loss import AcceptanceMetrics

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

LOG, CURVES = "log.jsonl", "curves.png"


class Journal:
    """Log of a run; entries of an interrupted run after the step from which it continues are removed.

    Args:
        directory: existing directory of the run.
        step: step from which the run continues, 0 for a new run.
    """

    def __init__(self, directory: Path, step: int) -> None:
        self._file, self._directory = directory / LOG, directory
        kept = [entry for entry in self.entries() if entry["step"] <= step]
        with replacing(self._file) as part:
            part.write_text("".join(json.dumps(entry) + "\n" for entry in kept), encoding="utf-8")
        self._board = _board(directory, step)

    def entries(self) -> list[dict[str, Any]]:
        """Complete entries, oldest first.

        Raises:
            DataError: the file is not the log of a run.
        """
        if not self._file.exists():
            return []
        lines = self._file.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]  # a crash may tear the last
        found = [_entry(line) for line in lines]
        if None in found:
            raise DataError(
                f"{self._file}: line {found.index(None) + 1} is not of the log of a run; move the file away, or choose "
                "another --output-dir"
            )
        return [entry for entry in found if entry is not None]

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Write an event: numbers, or lists of numbers by step of the unrolled draft."""
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"step": step, **values}) + "\n")
        for name, value in values.items():
            if isinstance(value, list):
                for i, each in enumerate(value):
                    self._board.add_scalar(f"{name}/{i + 1}", each, step)
            elif isinstance(value, int | float):
                self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Draw the curves and close the log."""
        self._board.close()
        draw(self.entries(), self._directory / CURVES)


def _entry(line: str) -> dict[str, Any] | None:
    """Event of a line, None for other lines."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and type(found.get("step")) is int else None


def _board(directory: Path, step: int) -> SummaryWriter:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(missing("tensorboard")) from error
    board: Any = SummaryWriter
    writer: SummaryWriter = board(str(directory / "tensorboard"), purge_step=step + 1 if step else None)
    return writer


def missing(package: str) -> str:
    """Message about a package of the extra that is not installed."""
    return f"training needs {package}, which is not installed; run: pip install 'sametoken[train]'"


def draw(entries: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Draw a PNG of loss, accuracy by step of the draft, and acceptance lengths over the steps of a run."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(missing("matplotlib")) from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    trained = [entry for entry in entries if "loss" in entry]
    evaluated = [entry for entry in entries if "eval_acceptance_length" in entry]
    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4), constrained_layout=True)
    steps = [entry["step"] for entry in trained]
    axes[0].plot(steps, [entry["loss"] for entry in trained])
    axes[0].set(title="loss", xlabel="step")
    for i in range(max((len(entry["accuracy"]) for entry in trained), default=0)):
        axes[1].plot(steps, [entry["accuracy"][i] for entry in trained], label=f"token {i + 1}")
    axes[1].set(title="accuracy, all before being right", xlabel="step", ylim=(0, 1))
    axes[2].plot(steps, [entry["acceptance_length"] for entry in trained], label="in training (estimate)")
    held_out = [entry["eval_acceptance_length"] for entry in evaluated]
    axes[2].plot([entry["step"] for entry in evaluated], held_out, "o-", label="held out")
    axes[2].set(title="acceptance length", xlabel="step")
    for axis in axes[1:]:
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize="small")
    figure.savefig(file, dpi=100)
    pyplot.close(figure)


class Window:
    """Metrics since the last log entry, and the time of training alone."""

    def __init__(self) -> None:
        self._report: AcceptanceMetrics | None = None
        self._tokens = self._all = 0
        self._since = self._busy = 0.0
        self.rate = 0.0
        self.go_on()

    def go_on(self) -> None:
        """Restart the clock: the time since the last `add` does not count."""
        self._mark = time.perf_counter()

    def add(self, report: AcceptanceMetrics, tokens: int) -> None:
        passed = time.perf_counter() - self._mark
        self._since, self._busy = self._since + passed, self._busy + passed
        self._report = report if self._report is None else self._report + report
        self._tokens, self._all = self._tokens + tokens, self._all + tokens

    def take(self) -> AcceptanceMetrics:
        assert self._report is not None
        found, self.rate = self._report, self._tokens / max(self._since, 1e-9)
        self._report, self._tokens, self._since = None, 0, 0.0
        return found

    @property
    def overall(self) -> float:
        return self._all / max(self._busy, 1e-9)
