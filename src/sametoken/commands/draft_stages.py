"""Stages of `sametoken draft`, each a command line of its own that this process runs and that a person can repeat.

The state of a run (settings, plan and results of finished stages) is one file of its directory.
"""

from __future__ import annotations

import io
import json
import math
import shlex
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from sametoken.commands.options import Chosen, given_words, spelled_as_option
from sametoken.errors import ConfigError, DataError, SametokenError, UnsupportedModelError
from sametoken.files import read_object, write_json
from sametoken.options.training import ROW
from sametoken.train.budget import DraftPlan
from sametoken.train.defaults import MOST_STEPS

FILE = "draft.json"
FORMAT = 1
TEMPERATURE = 0.7  # of the second part of the answers, and of the second evaluation
HELD_OUT_TOKENS = 32  # of the answers to held-out prompts, which nothing is trained on
CHAINS = "2,4,6"
DRAFT_LEN = 4  # in evaluations
FORMATS: dict[str, dict[str, Any]] = {"int8": {}, "int4": {"group_size": 32}}  # that the head is rounded to
TRAINED = "trained"  # the head as training wrote it
MEASURED = 16  # conversations of the first minute: a full batch
MEASURED_STEPS = 4
VARIANT = ("max_draft_len", "chosen", "tokens_per_second")  # keys of a variant of `bench`
PARTS = ("greedy", "sampled")  # of the answers


class DraftJob(NamedTuple):
    """Target and settings of a run.

    Attributes:
        model: name of the target.
        out: directory of the run.
        data: files of conversations; () lets the target write the users' turns.
        vocabulary: size of the draft vocabulary, None for all of the target's.
        threads: threads of every stage, None for one per core.
    """

    model: str
    out: Path
    data: tuple[str, ...]
    max_tokens: int
    seed: int
    vocabulary: int | None
    threads: int | None

    @property
    def held_out(self) -> Path:
        """File of the held-out prompts."""
        return self.out / "held-out.jsonl"

    @property
    def head(self) -> Path:
        """Directory of the head to serve."""
        return self.out / "head"

    def prompts(self, part: str) -> Path:
        """File of the given conversations that one part of the answers is for."""
        return self.out / f"prompts-{part}.jsonl"


class Stage(NamedTuple):
    """One command.

    Attributes:
        key: name of the stage within the run.
        title: description for people.
        argument: its model or head.
        options: values of its options by name; the others have their defaults.
        seconds: estimate of its time.
    """

    key: str
    title: str
    command: str
    argument: str
    options: dict[str, Any]
    seconds: float

    @property
    def line(self) -> str:
        """Command line."""
        return shlex.join(["sametoken", self.command, self.argument, *given_words(self._module.OPTIONS, self._values)])

    @property
    def _module(self) -> Any:
        return import_module(f"sametoken.commands.{self.command}")

    @property
    def _values(self) -> Chosen:
        defaults = {option.name: option.default for option in self._module.OPTIONS}
        return Chosen(defaults | self.options, self.options)

    def run(self) -> tuple[int, dict[str, Any]]:
        """Run the command in this process; return its exit code and its JSON, {} if it was stopped.

        Raises:
            SametokenError: as the command does.
        """
        values = self._values
        values["json"] = True
        with redirect_stdout(io.StringIO()) as printed:
            try:
                code: int = self._module.command(self.argument, values)
            except ConfigError as error:
                raise spelled_as_option(error, self._module.OPTIONS) from error
        lines = printed.getvalue().splitlines()
        return code, self._figures(json.loads(lines[-1])) if lines else {}

    def _figures(self, record: dict[str, Any]) -> dict[str, Any]:
        """JSON of the command, and of a measurement of speed the figures of the card only."""
        if self.command != "bench":
            return record
        (cell,), machine = record["cells"], record["environment"]
        variants = [
            {**{name: each[name] for name in VARIANT}, "speed_up": each["speed_up"]["value"]}
            for each in cell["variants"]
        ]
        return {"cpu": machine["cpu"], "threads": machine["threads"], "prompts": cell["prompts"], "variants": variants}


def stages(job: DraftJob, plan: DraftPlan, tokens: int) -> Iterator[Stage]:
    """Yield the stages of a plan in order, up to the choice of the head's format.

    Args:
        tokens: number of tokens of the samples, or an estimate of it, which decides the number of evaluations.
    """
    make = partial(_stage, job, plan.seconds)
    if not job.data:
        yield make(
            "held-out", f"{plan.held_out} held-out prompts", "synthesize", job.model, self_prompts=plan.held_out,
            turns=1, max_tokens=HELD_OUT_TOKENS, temperature=0.0, seed=job.seed, output=str(job.held_out),
        )  # fmt: skip
    first = plan.conversations - plan.conversations // 2
    for part, count, temperature in (("greedy", first, 0.0), ("sampled", plan.conversations - first, TEMPERATURE)):
        title, output = f"{count} answers at temperature {temperature:g}", str(job.out / f"{part}.jsonl")
        apart = {} if job.data else {"exclude": str(job.held_out)}
        yield make(
            part, title, "synthesize", job.model, **_prompts(job, part, count), **apart, temperature=temperature,
            output=output,
        )  # fmt: skip
    states = {"hidden_states": True} if plan.hidden_states else {}
    prepared, answers = str(job.out / "prepared"), [str(job.out / f"{part}.jsonl") for part in PARTS]
    yield make(
        "prepare", "samples" + " and hidden states" * plan.hidden_states, "prepare", job.model, data=answers,
        output=prepared, **_vocabulary(job), exclude=str(job.held_out), **states,
    )  # fmt: skip
    steps = min(MOST_STEPS, max(1, round(plan.epochs * math.ceil(tokens / ROW))))
    yield make(
        "train", f"training, {plan.epochs:.3g} epochs, about {steps} steps", "train", job.model, data=prepared,
        output_dir=str(job.out / "training"), num_epochs=plan.epochs, seed=job.seed, eval_data=str(job.held_out),
        eval_prompts=plan.held_out, eval_steps=math.ceil(steps / plan.evaluations), max_draft_len=DRAFT_LEN,
        logging_steps=max(1, steps // 40),
    )  # fmt: skip
    for format, more in FORMATS.items():
        yield make(
            f"quantize {format}", f"the head in {format}", "quantize", str(written(job, TRAINED)), target=job.model,
            format=format, **more, data=str(job.held_out), calibration_tokens=1024, held_out_tokens=1024,
            output=str(written(job, format)), overwrite=True,
        )  # fmt: skip
    for form in (TRAINED, *FORMATS):
        yield make(
            f"bench {form}", f"speed of the head ({form})", "bench", job.model, draft=str(written(job, form)),
            workload=[str(job.held_out)], limit=plan.bench_prompts, max_draft_len=CHAINS,
            max_tokens=plan.bench_tokens, repeat=plan.bench_rounds,
        )  # fmt: skip


def evaluations(job: DraftJob, plan: DraftPlan) -> Iterator[Stage]:
    """Yield the evaluations of the chosen head."""
    for temperature in (0.0, TEMPERATURE):
        yield _stage(
            job, plan.seconds, f"evaluate {temperature:g}", f"acceptance at temperature {temperature:g}", "evaluate",
            str(job.head), target=job.model, data=str(job.held_out), max_draft_len=DRAFT_LEN,
            num_samples=plan.held_out, temperature=temperature,
        )  # fmt: skip


def measurements(job: DraftJob) -> Iterator[Stage]:
    """Yield the short runs of the first minute, from which the plan is made."""
    make, place = partial(_stage, job, {}), job.out / "measured"
    answers, prepared, training = (str(place / name) for name in ("answers.jsonl", "prepared", "training"))
    asked = _prompts(job, "greedy", MEASURED)
    yield make("answers", "answers", "synthesize", job.model, **asked, temperature=0.0, output=answers)
    yield make(
        "prepare", "samples", "prepare", job.model, data=[answers], output=prepared, **_vocabulary(job),
        hidden_states=True,
    )  # fmt: skip
    yield make(
        "train", "training", "train", job.model, data=prepared, output_dir=training, max_steps=MEASURED_STEPS,
        logging_steps=1,
    )  # fmt: skip


def written(job: DraftJob, form: str) -> Path:
    """Directory of the head in a format, or as trained."""
    return job.out / "training" / "head" if form == TRAINED else job.out / f"head-{form}"


def check(stage: Stage, code: int, record: dict[str, Any]) -> None:
    """Raise SametokenError for a result that no further stage can use."""
    if stage.command == "synthesize" and code == 1 and not record["written"] + record["kept"]:
        raise SametokenError(f"{stage.options['output']}.failed.jsonl: no conversation has an answer; it says why")
    if stage.command == "bench" and code == 1:
        raise SametokenError(f"tokens differ from plain decoding in: {stage.line}")


def left_out(stage: Stage, error: SametokenError) -> bool:
    """True if the run goes on without the result of a stage: a format that the head's sizes do not allow."""
    return stage.command == "quantize" and isinstance(error, UnsupportedModelError)


def _prompts(job: DraftJob, part: str, count: int) -> dict[str, Any]:
    """Options of the conversations of one part: given ones, or those that the target begins."""
    chosen = {"max_tokens": job.max_tokens, "seed": job.seed + 1 + PARTS.index(part)}
    if job.data:
        return {**chosen, "data": str(job.prompts(part)), "limit": count}
    return {**chosen, "self_prompts": count, "turns": 1}


def _vocabulary(job: DraftJob) -> dict[str, Any]:
    return {} if job.vocabulary is None else {"draft_vocab_size": job.vocabulary, "fill_vocabulary": True}


def _stage(
    job: DraftJob, seconds: Mapping[str, float], key: str, title: str, command: str, argument: str, **options: Any
) -> Stage:
    threads = {} if job.threads is None else {"threads": job.threads}
    estimate = seconds.get("answers" if key in PARTS else key.partition(" ")[0], 0.0)
    return Stage(key, title, command, argument, options | threads, estimate)


class DraftState:
    """State of the run in a directory.

    Args:
        out: directory, which this process has locked.
        settings: JSON values that decide the results; they must be those that the run was begun with.

    Attributes:
        content: `rates`, `plan`, `budget_s`, `planned_s`, `chosen` and `spent_s`, as they become known.
        results: JSON of each finished stage; None for one that was left out.

    Raises:
        ConfigError: the directory has a run with other settings, or other files.
    """

    def __init__(self, out: Path, settings: dict[str, Any]) -> None:
        self._file = out / FILE
        if self._file.exists():
            self.content = self._read(settings)
        elif any(out.iterdir()):
            raise ConfigError(
                f"--output-dir {out} has files but no {FILE} of an earlier `sametoken draft`; choose another directory"
            )
        else:
            self.content = {"format": FORMAT, "settings": settings, "results": {}}
            self.note(0.0)
        self.results: dict[str, Any] = self.content["results"]

    def _read(self, settings: dict[str, Any]) -> dict[str, Any]:
        content = read_object(self._file)
        if content.get("format") != FORMAT or not isinstance(content.get("settings"), dict):
            raise DataError(f"{self._file}: not the state of a run of this version; choose another --output-dir")
        begun = content["settings"]
        for name in sorted(settings.keys() | begun.keys()):
            self._compare(name, begun.get(name), settings.get(name))
        return content

    def _compare(self, name: str, before: Any, now: Any) -> None:
        if before != now:
            raise ConfigError(
                f"{self._file.parent} was begun with {name} = {json.dumps(before)}, now it is {json.dumps(now)}; go on "
                "with the same, or choose another --output-dir"
            )

    def check_budget(self, seconds: float) -> None:
        """Raise ConfigError if a plan was made for another budget."""
        if "plan" in self.content:
            self._compare("budget in seconds", self.content["budget_s"], seconds)

    def note(self, spent_s: float, **found: Any) -> None:
        """Write new content, and the seconds that the run took so far."""
        self.content |= found | {"spent_s": spent_s}
        write_json(self._file, self.content)

    def finish(self, stage: str, record: dict[str, Any] | None, spent_s: float) -> None:
        """Write the result of a stage."""
        self.results[stage] = record
        self.note(spent_s)
