"""Diagnosis of `sametoken doctor`: facts of a head from its files, and its acceptance with a target.

Where files may mean other layers than was assumed, both readings are run, since only acceptance can tell them apart.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from sametoken.engine.llm import LLM
from sametoken.heads.files import Files
from sametoken.heads.kind import ENGINES, Head, Reading
from sametoken.heads.read import LoadedHead, describe, read_head, stored_dtype
from sametoken.heads.registry import head_kind
from sametoken.heads.write import write_head
from sametoken.model.config import ModelConfig
from sametoken.options.sampling import SamplingParams
from sametoken.prompts.sources import encode_texts

CLEARLY = 1.05  # another reading must accept so many times the tokens to be called the better one


class ReadingResult(NamedTuple):
    """Acceptance of a head's guesses by a target, over all prompts.

    Attributes:
        length: tokens emitted per target forward, the bonus token included.
        rate: accepted / drafted.
        covered: share of the emitted tokens that the head can guess at all.
    """

    reading: Reading
    length: float
    rate: float
    covered: float


class Trial(NamedTuple):
    """Settings of a measurement of acceptance.

    Attributes:
        target: its name, and `shape` what it is.
        prompts: built-in prompts to run.
        engine: further arguments of `LLM`.
    """

    target: str
    shape: ModelConfig
    params: SamplingParams
    prompts: int
    engine: dict[str, Any]


@dataclass(frozen=True)
class Diagnosis:
    """Description of a head from its files.

    Attributes:
        facts: name and value in words, in the order to show them.
        notes: what was assumed, or is likely to cost acceptance.
        engines: per engine why it cannot run the head; () is that it can.
        readings: of the layers, the chosen one first; one without layers for heads that have none to choose.
    """

    head: str
    producer: str
    kind: str
    facts: dict[str, str]
    notes: tuple[str, ...]
    engines: dict[str, tuple[str, ...]]
    readings: tuple[Reading, ...]

    def to_json(self, acceptance: Sequence[ReadingResult], advice: str | None) -> dict[str, Any]:
        """The documented object of `sametoken doctor --json`."""
        found = asdict(self) | {"readings": [reading._asdict() for reading in self.readings]}
        measured = [{**item._asdict(), "reading": item.reading._asdict()} for item in acceptance]
        return found | {"acceptance": measured, "advice": advice}


def diagnose(directory: Path, target: ModelConfig) -> tuple[Diagnosis, LoadedHead]:
    """The facts of a head, whose weights are read and checked.

    Raises:
        SametokenError: the files are damaged, contradict each other, or belong to another target.
    """
    described = describe(Files.of(directory), target)
    loaded = read_head(directory, target, stored_dtype(directory), "cpu", pack=False)
    config, kind = described.config, head_kind(described.config)
    tensors = kind.lay_out(loaded.module, target, "hf", "").tensors
    others = {layout: name for layout, name in ENGINES.items() if layout != "hf"}
    engines = {name: tuple(kind.refusals(config, layout, tensors)) for layout, name in others.items()}
    parameters = sum(parameter.numel() for parameter in loaded.module.parameters())
    facts = {"weights": f"{parameters / 1e6:.1f} million, {str(loaded.module.dtype).removeprefix('torch.')}"}
    return (
        Diagnosis(
            head=str(directory),
            producer=described.producer,
            kind=kind.title(config),
            facts={**facts, **described.facts},
            notes=(*described.notes, *kind.warnings(loaded.module, target)),
            engines=engines,
            readings=described.readings,
        ),
        loaded,
    )


def measure_acceptance(diagnosis: Diagnosis, loaded: LoadedHead, trial: Trial) -> Iterator[ReadingResult]:
    """Run prompts with every reading of the head, the chosen one first."""
    module = loaded.module
    with TemporaryDirectory(prefix="sametoken-doctor-") as place:
        for reading in diagnosis.readings:
            if reading.taps:
                module = head_kind(module.config).with_taps(module, reading.taps, trial.shape)
            written = Path(place) / "head"
            write_head(module, written, trial.shape, target_name=trial.target)
            llm = LLM(trial.target, str(written), **trial.engine)
            yield _accepted(llm, module, reading, trial)
            del llm
            gc.collect()  # the target is loaded again, and two may not fit


def _accepted(llm: LLM, module: Head, reading: Reading, trial: Trial) -> ReadingResult:
    prompts = [prompt.ids for prompt in encode_texts(llm.tokenizer)[: trial.prompts]]
    done = llm.generate(prompts, trial.params)
    stats = [completion.speculation for completion in done]
    emitted, drafted = sum(one.emitted for one in stats), sum(one.drafted for one in stats)
    tokens = torch.tensor([token for completion in done for token in completion.token_ids])
    known = torch.isin(tokens, module.draft_ids)
    return ReadingResult(
        reading,
        length=emitted / max(1, sum(one.target_forwards for one in stats)),
        rate=sum(one.accepted for one in stats) / max(1, drafted),
        covered=float(known.float().mean()) if len(tokens) else 0.0,
    )


def advise(acceptance: Sequence[ReadingResult]) -> str | None:
    """Advice about the head's layers from the acceptance of the readings; None for a single reading."""
    if len(acceptance) < 2:
        return None
    chosen, other = acceptance[:2]
    lengths = f"({other.length:.2f} against {chosen.length:.2f} tokens a forward)"
    if chosen.length >= CLEARLY * other.length:
        return f"the other reading accepts clearly less {lengths}: layers {_listed(chosen.reading.taps)} are meant"
    if other.length < CLEARLY * chosen.length:
        return f"both readings accept about as much {lengths}: this cannot tell which layers are meant"
    taps = ",".join(map(str, other.reading.taps))
    return (
        f"reading layers {_listed(other.reading.taps)} accepts clearly more {lengths}: the ids are meant that way; "
        f"sametoken export HEAD --to hf --taps {taps} writes a head that says so"
    )


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
