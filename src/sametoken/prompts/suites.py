"""Published benchmarks for drafts: form of their files, number of prompts, length of answers, and categories."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sametoken.errors import DataError
from sametoken.prompts.conversations import DataRow

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
TASKS = ("translation", "summarization", "qa", "math_reasoning", "rag")
SPEED_BENCH = (
    "coding", "humanities", "math", "multilingual", "qa", "rag", "reasoning", "roleplay", "stem", "summarization",
    "writing",
)  # fmt: skip
TURNS = ("question_id", "category", "turns")
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"  # in turns that SPEED-Bench's published file leaves out


@dataclass(frozen=True)
class Suite:
    """One benchmark.

    Attributes:
        keys: keys that each object of its file has.
        prompts: number of objects of its file; each has one or several turns.
        tokens: most tokens of each answer.
        text: key of the user's text, or of the list of the user's turns.
        tasks: reported category by category of the file; empty if all prompts have the category `name`.
        apart: keys by which a file of another benchmark is recognised.
        note: further protocol, for people.
    """

    name: str
    keys: tuple[str, ...]
    prompts: int
    tokens: int = 1024
    text: str = "turns"
    tasks: Mapping[str, str] | None = None
    apart: tuple[str, ...] = ()
    note: str = "later turns follow the answers of the model"

    def definition(self) -> str:
        """Protocol in words."""
        return (
            f"{self.name}: {self.prompts} prompts as user turns of the target's chat template, {self.note}; answers of "
            f"at most {self.tokens} tokens"
        )

    def rows(self, found: Iterable[DataRow], count: int, file: str) -> list[DataRow]:
        """Objects of the benchmark's file as turns with a category: so many, evenly from the categories.

        Raises:
            DataError: an object has another form than those of the benchmark, or their number differs.
        """
        turns = [row._replace(entry=self._turns(row.entry, row.where)) for row in found]
        if len(turns) != self.prompts:
            raise DataError(
                f"{file}: {len(turns)} prompts, expected the {self.prompts} of {self.name}; give its whole file (with "
                "--num-samples for a part of it), or --data without --suite for other prompts"
            )
        rank: dict[str, int] = defaultdict(int)
        order = []
        for place, row in enumerate(turns):
            order.append((rank[row.entry["category"]], place))
            rank[row.entry["category"]] += 1
        return [turns[place] for place in sorted(place for _, place in sorted(order)[:count])]

    def _turns(self, entry: dict[str, Any], where: str) -> dict[str, Any]:
        missing = [key for key in self.keys if key not in entry]
        if missing or any(key in entry for key in self.apart):
            raise DataError(
                f"{where}: keys {', '.join(entry)[:80]}, expected {', '.join(self.keys)} as in the file of {self.name}"
                + ("" if missing else f" without {', '.join(self.apart)}")
            )
        category = self.name
        if self.tasks is not None:
            stated = str(entry["category"]).lower()
            if stated not in self.tasks:
                raise DataError(
                    f"{where}: category {entry['category']!r}, expected one of {self.name}: {', '.join(self.tasks)}"
                )
            category = self.tasks[stated]
        text = entry[self.text]
        if PLACEHOLDER in str(text):
            raise DataError(
                f"{where}: the turns of {self.name} are placeholders; fill them in with the benchmark's own script "
                "(prepare_data.py of specdec_bench) and write the rows as JSON lines"
            )
        return {"turns": text if self.text == "turns" else [text], "category": category}


def _own(names: Iterable[str]) -> dict[str, str]:
    return {name: name for name in names}


SUITES = {
    suite.name: suite
    for suite in (
        Suite("mt-bench", TURNS, 80, tasks=_own(MT_BENCH), apart=("sub_category",)),
        Suite("humaneval", ("task_id", "prompt", "entry_point"), 164, text="prompt", note="without an instruction"),
        Suite("gsm8k", ("question", "answer"), 1319, text="question", note="without examples"),
        Suite(
            "spec-bench", TURNS, 480, apart=("sub_category",),
            tasks=_own(TASKS) | dict.fromkeys(MT_BENCH, "multi-turn"),
            note="MT-bench's eight categories as one, later turns follow the answers of the model",
        ),
        Suite(
            "speed-bench", (*TURNS, "sub_category"), 880, 4096, tasks=_own(SPEED_BENCH),
            note="its qualitative split, later turns follow the answers of the model",
        ),
    )
}  # fmt: skip
