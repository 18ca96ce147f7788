"""Diagnosis of a head: facts from its files, and its acceptance with a target.

If the layer ids of the files are ambiguous, acceptance is measured with both readings.
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

CLEARLY = 1.05  # least ratio of acceptance lengths for a verdict on readings


class ReadingResult(NamedTuple):
    """Acceptance of a head's guesses over all prompts.

    Attributes:
        reading: layers of the head.
        length: emitted tokens per target forward, with the bonus token.
        rate: accepted / drafted tokens.
        covered: share of the emitted tokens that are in the head's vocabulary.
    """

    reading: Reading
    length: float
    rate: float
    covered: float


class Trial(NamedTuple):
    """Settings of a measurement of acceptance.

    Attributes:
        target: name of the target.
        shape: configuration of the target.
        params: sampling parameters.
        prompts: number of built-in prompts.
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
        head: directory.
        producer: tool that wrote the head.
        kind: kind of the head.
        facts: printed facts by name.
        notes: assumptions, and likely causes of low acceptance.
        engines: reasons for which an engine cannot run the head, by engine; () if it can.
        readings: readings of the layer ids, the selected one first; one without layers for kinds without layer ids.
    """

    head: str
    producer: str
    kind: str
    facts: dict[str, str]
    notes: tuple[str, ...]
    engines: dict[str, tuple[str, ...]]
    readings: tuple[Reading, ...]

    def to_json(self, acceptance: Sequence[ReadingResult], advice: str | None) -> dict[str, Any]:
        """JSON object of `sametoken doctor HEAD --json`."""
        found = asdict(self) | {"readings": [reading._asdict() for reading in self.readings]}
        measured = [{**item._asdict(), "reading": item.reading._asdict()} for item in acceptance]
        return found | {"acceptance": measured, "advice": advice}


def diagnose(directory: Path, target: ModelConfig) -> tuple[Diagnosis, LoadedHead]:
    """Describe a head, and load its weights.

    Raises:
        SametokenError: the files are damaged, inconsistent, or belong to another target.
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
    """Run prompts with every reading of the head, the selected one first."""
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
            gc.collect()  # the target is loaded again; memory may not suffice for two


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
    """Advice on the head's layer ids from the acceptance of two readings; None for a single reading."""
    if len(acceptance) < 2:
        return None
    chosen, other = acceptance[:2]
    lengths = f"({other.length:.2f} against {chosen.length:.2f} tokens a forward)"
    if chosen.length >= CLEARLY * other.length:
        return f"the other reading accepts clearly less {lengths}: layers {_listed(chosen.reading.taps)} are meant"
    if other.length < CLEARLY * chosen.length:
        return f"both readings accept about as much {lengths}: acceptance does not decide between them"
    taps = ",".join(map(str, other.reading.taps))
    return (
        f"reading layers {_listed(other.reading.taps)} accepts clearly more {lengths}: the ids are meant that way; "
        f"sametoken export HEAD --to hf --taps {taps} writes a head with these layers"
    )


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
