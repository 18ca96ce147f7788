"""What is compared: cells, the goals between them, and the statistics of their attempts. No process, no clock."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

FOREIGN_LIMIT = 0.15  # cores: above, an attempt says more about the neighbours than about the engine


class Cell(NamedTuple):
    """One engine at one precision in one mode."""

    engine: str
    dtype: str
    mode: str

    def __str__(self) -> str:
        return "/".join(self)

    @classmethod
    def of(cls, text: str) -> Cell:
        return cls(*text.split("/"))

    @property
    def host(self) -> tuple[str, ...]:
        """What must be running for this cell: one process serves all modes where a request can choose the mode."""
        return self[:2] if self.engine in ("sametoken", "transformers") else tuple(self)


# Formats of files: what the cells of several engines read is one file or directory, made when it is first needed.
GGUF = ("q8_0", "q4_0", "q4_k_m")
DIRECTORIES = ("fp8", "w8a8", "w4a16", "awq", "nvfp4", "mxfp4")

# The slow to start come first: when memory is short, the process that was used last is closed.
CELLS = tuple(
    Cell(engine, dtype, mode)
    for engine, dtypes, modes in (
        ("vllm", ("bf16", *DIRECTORIES), ("plain", "draft")),
        ("transformers", ("bf16",), ("plain", "draft", "ngram")),
        ("sametoken", ("bf16",), ("plain", "draft", "ngram")),
        ("sametoken", ("int8", "int4", *DIRECTORIES, *GGUF), ("plain", "draft")),
        ("llama.cpp", ("bf16",), ("plain", "draft")),
        ("llama.cpp", GGUF, ("plain", "draft", "draft-p75")),
    )
    for dtype in dtypes
    for mode in modes
)


class Goal(NamedTuple):
    """A ratio of speeds: ours above, the best of the others below.

    Attributes:
        aim: at least this; None is reported only.
    """

    above: Cell
    below: tuple[Cell, ...]
    aim: float | None

    def __str__(self) -> str:
        below = ", ".join(map(str, self.below))
        return f"{self.above} / {'best of ' * (len(self.below) > 1)}{below}"


def _goal(above: str, below: str, aim: float | None) -> Goal:
    return Goal(Cell.of(above), tuple(Cell.of(text) for text in below.split()), aim)


def _file_goals() -> tuple[Goal, ...]:
    """On one file: plain at least level with the better engine, with the draft twice the best of anything it does."""
    rivals = {dtype: [Cell("llama.cpp", dtype, mode) for mode in ("plain", "draft", "draft-p75")] for dtype in GGUF}
    rivals |= {dtype: [Cell("vllm", dtype, mode) for mode in ("plain", "draft")] for dtype in DIRECTORIES}
    return tuple(
        goal
        for dtype, cells in rivals.items()
        for goal in (
            Goal(Cell("sametoken", dtype, "plain"), (cells[0],), 1.0),
            Goal(Cell("sametoken", dtype, "draft"), tuple(cells), 2.0),
            Goal(Cell("sametoken", dtype, "draft"), (Cell("sametoken", dtype, "plain"),), None),
        )
    )


GOALS = (
    _goal("sametoken/bf16/plain", "transformers/bf16/plain", 1.6),
    _goal("sametoken/bf16/plain", "llama.cpp/bf16/plain", 1.0),
    _goal("sametoken/bf16/plain", "vllm/bf16/plain", 1.0),
    _goal("sametoken/bf16/draft", "transformers/bf16/draft", 1.6),
    _goal("sametoken/bf16/draft", "vllm/bf16/draft", 1.15),
    _goal("sametoken/bf16/draft", "llama.cpp/bf16/draft", 1.5),
    _goal("sametoken/int8/draft", "llama.cpp/q8_0/plain llama.cpp/q8_0/draft llama.cpp/q8_0/draft-p75", 1.8),
    _goal("sametoken/int4/draft", "llama.cpp/q4_0/plain llama.cpp/q4_0/draft llama.cpp/q4_0/draft-p75", 1.5),
    _goal("sametoken/bf16/draft", "sametoken/bf16/plain", None),
    _goal("sametoken/int8/draft", "sametoken/int8/plain", None),
    _goal("sametoken/int4/draft", "sametoken/int4/plain", None),
    _goal("sametoken/bf16/ngram", "sametoken/bf16/plain", None),
    _goal("sametoken/bf16/ngram", "transformers/bf16/ngram", None),
    *_file_goals(),
)


@dataclass
class Attempt:
    """A cell's answers in one round, one per prompt.

    Attributes:
        wall, foreign: seconds of the visits, and CPU seconds that others used during them.
    """

    round: int
    cell: Cell
    answers: list[dict[str, Any]] = field(default_factory=list)
    wall: float = 0.0
    foreign: float = 0.0

    @property
    def speed(self) -> float:
        """Tokens per second after each prompt's first emission."""
        return float(sum(a["timed_tokens"] for a in self.answers) / sum(a["seconds"] for a in self.answers))

    @property
    def acceptance_length(self) -> float:
        """Tokens per target forward after the prompt."""
        return float(sum(a["timed_tokens"] for a in self.answers) / sum(a["steps"] for a in self.answers))

    @property
    def foreign_cores(self) -> float:
        return self.foreign / self.wall

    @property
    def clean(self) -> bool:
        return self.foreign_cores <= FOREIGN_LIMIT

    def to_json(self) -> dict[str, Any]:
        return {
            "round": self.round,
            "cell": str(self.cell),
            "tokens_per_second": self.speed,
            "acceptance_length": self.acceptance_length,
            "foreign_cores": self.foreign_cores,
            "clean": self.clean,
            "wall": self.wall,
            "answers": [answer | {"tokens": " ".join(map(str, answer["tokens"]))} for answer in self.answers],
        }


class Spread(NamedTuple):
    """Median and range.

    Attributes:
        kept, tried: how many figures count, of how many.
        all_loaded: every one was taken under foreign load, so that all count although none should.
    """

    median: float
    low: float
    high: float
    kept: int
    tried: int
    all_loaded: bool

    @classmethod
    def of(cls, figures: Sequence[tuple[float, bool]]) -> Spread:
        """Of (figure, clean) pairs, at least one."""
        kept = [figure for figure, clean in figures if clean] or [figure for figure, _ in figures]
        none_clean = not any(clean for _, clean in figures)
        return cls(statistics.median(kept), min(kept), max(kept), len(kept), len(figures), none_clean)


def speeds(attempts: Iterable[Attempt]) -> dict[Cell, Spread]:
    """Tokens per second of each cell that has an attempt."""
    figures: dict[Cell, list[tuple[float, bool]]] = {}
    for attempt in attempts:
        figures.setdefault(attempt.cell, []).append((attempt.speed, attempt.clean))
    return {cell: Spread.of(pairs) for cell, pairs in figures.items()}


def ratio(goal: Goal, attempts: Iterable[Attempt]) -> Spread | None:
    """A goal's ratio round by round; None if no round has its cells. Cells that are absent below do not compete."""
    rounds: dict[int, dict[Cell, Attempt]] = {}
    for attempt in attempts:
        rounds.setdefault(attempt.round, {})[attempt.cell] = attempt
    figures = []
    for cells in rounds.values():
        below = [cells[cell] for cell in goal.below if cell in cells]
        if goal.above in cells and below:
            above = cells[goal.above]
            best = max(attempt.speed for attempt in below)
            figures.append((above.speed / best, above.clean and all(a.clean for a in below)))
    return Spread.of(figures) if figures else None


class Agreement(NamedTuple):
    """How many of a cell's prompts gave the same tokens as plain decoding: its own engine's, and ours in bf16."""

    own: int | None
    ours: int | None
    prompts: int


def agreement(cell: Cell, texts: Mapping[Cell, Sequence[Sequence[int]]]) -> Agreement:
    """Compares token ids; None where there is nothing to compare with."""

    def equal(other: Cell) -> int | None:
        if other not in texts or other == cell:
            return None
        return sum(list(a) == list(b) for a, b in zip(texts[cell], texts[other], strict=True))

    own = equal(Cell(cell.engine, cell.dtype, "plain"))
    return Agreement(own, equal(Cell("sametoken", "bf16", "plain")) if cell.dtype == "bf16" else None, len(texts[cell]))
