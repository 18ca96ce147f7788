"""Stages of `sametoken draft`, each a command line of its own that this process runs and that a person can repeat."""

from __future__ import annotations

import io
import json
import math
import shlex
from collections.abc import Iterator
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from sametoken.commands.options import Chosen, given_words, spelled_as_option
from sametoken.errors import ConfigError, SametokenError, UnsupportedModelError
from sametoken.options.training import ROW
from sametoken.train.budget import DraftPlan
from sametoken.train.defaults import MOST_STEPS

TEMPERATURE = 0.7  # of the second half of the answers, and of the second evaluation
HELD_OUT_TOKENS = 32  # of the answers to held-out prompts, which nothing is trained on
CHAINS = "2,4,6"
DRAFT_LEN = 4  # in evaluations
FORMATS = {"int8": {}, "int4": {"group_size": 32}}  # that the head is rounded to
TRAINED = "trained"  # the head as training wrote it
MEASURED = 16  # conversations of the first minute: a full batch
MEASURED_STEPS = 4


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

    def prompts(self, half: str) -> Path:
        """File of the given conversations that one half of the answers is for."""
        return self.out / f"prompts-{half}.jsonl"


class Stage(NamedTuple):
    """One command.

    Attributes:
        key: name of the stage within the run.
        what: what it does, for people.
        argument: its model or head.
        options: values of its options by name; the others have their defaults.
        seconds: estimate of its time.
    """

    key: str
    what: str
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
        return code, json.loads(lines[-1]) if lines else {}


def stages(job: DraftJob, plan: DraftPlan, tokens: int) -> Iterator[Stage]:
    """Yield the stages of a plan in order, up to the choice of the head's format.

    Args:
        tokens: number of tokens of the samples, or an estimate of it, which decides the number of evaluations.
    """
    if not job.data:
        chosen = {"self_prompts": plan.held_out, "turns": 1, "max_tokens": HELD_OUT_TOKENS, "temperature": 0.0}
        yield _synthesis(job, "held-out", f"{plan.held_out} held-out prompts", chosen | {"seed": job.seed}, plan)
    for half, temperature in (("greedy", 0.0), ("sampled", TEMPERATURE)):
        count = plan.conversations // 2 + (plan.conversations % 2 if half == "greedy" else 0)
        what = f"{count} answers at temperature {temperature:g}"
        yield _synthesis(job, half, what, _answers(job, half, count) | {"temperature": temperature}, plan)
    prepared = job.out / "prepared"
    states = " and hidden states" if plan.hidden_states else ""
    yield _stage(
        job, "prepare", f"samples{states}", "prepare", job.model,
        _samples(job, [job.out / "greedy.jsonl", job.out / "sampled.jsonl"], prepared)
        | {"exclude": str(job.held_out), "hidden_states": plan.hidden_states}, plan,
    )  # fmt: skip
    steps = min(MOST_STEPS, max(1, round(plan.epochs * math.ceil(tokens / ROW))))
    yield _stage(
        job, "train", f"training, {plan.epochs:.3g} epochs, about {steps} steps", "train", job.model,
        {
            "data": str(prepared), "output_dir": str(job.out / "training"), "num_epochs": plan.epochs,
            "eval_data": str(job.held_out), "eval_prompts": plan.held_out, "max_draft_len": DRAFT_LEN,
            "eval_steps": math.ceil(steps / plan.evaluations), "logging_steps": max(1, steps // 40), "seed": job.seed,
        }, plan,
    )  # fmt: skip
    for format, more in FORMATS.items():
        chosen = {"target": job.model, "format": format, **more, "data": str(job.held_out), "overwrite": True,
                  "output": str(written(job, format)), "calibration_tokens": 1024, "held_out_tokens": 1024}  # fmt: skip
        trained = str(written(job, TRAINED))
        yield _stage(job, f"quantize {format}", f"the head in {format}", "quantize", trained, chosen, plan)
    for form in (TRAINED, *FORMATS):
        chosen = {"draft": str(written(job, form)), "workload": [str(job.held_out)], "limit": plan.bench_prompts,
                  "max_draft_len": CHAINS, "max_tokens": plan.bench_tokens, "repeat": plan.bench_rounds}  # fmt: skip
        yield _stage(job, f"bench {form}", f"speed of the head ({form})", "bench", job.model, chosen, plan)


def judgements(job: DraftJob, plan: DraftPlan) -> Iterator[Stage]:
    """Yield the evaluations of the chosen head."""
    for temperature in (0.0, TEMPERATURE):
        chosen = {"target": job.model, "data": str(job.held_out), "max_draft_len": DRAFT_LEN,
                  "num_samples": plan.held_out, "temperature": temperature}  # fmt: skip
        what = f"acceptance at temperature {temperature:g}"
        yield _stage(job, f"evaluate {temperature:g}", what, "evaluate", str(job.head), chosen, plan)


def measurements(job: DraftJob) -> Iterator[Stage]:
    """Yield the short runs of the first minute, from which the plan is made."""
    place = job.out / "measured"
    answers, prepared = place / "answers.jsonl", place / "prepared"
    asked = _answers(job, "greedy", MEASURED) | {"output": str(answers), "temperature": 0.0}
    asked.pop("exclude", None)
    yield _stage(job, "answers", "answers", "synthesize", job.model, asked)
    yield _stage(
        job, "prepare", "samples", "prepare", job.model, _samples(job, [answers], prepared) | {"hidden_states": True}
    )
    chosen = {"data": str(prepared), "output_dir": str(place / "training"), "max_steps": MEASURED_STEPS}
    yield _stage(job, "train", "training", "train", job.model, chosen)


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


def _answers(job: DraftJob, half: str, count: int) -> dict[str, Any]:
    seed, limits = job.seed + ("held-out", "greedy", "sampled").index(half), {"max_tokens": job.max_tokens}
    if job.data:
        return {"data": str(job.prompts(half)), "limit": count, "seed": seed, **limits}
    return {"self_prompts": count, "turns": 1, "exclude": str(job.held_out), "seed": seed, **limits}


def _synthesis(job: DraftJob, key: str, what: str, chosen: dict[str, Any], plan: DraftPlan) -> Stage:
    return _stage(job, key, what, "synthesize", job.model, {**chosen, "output": str(job.out / f"{key}.jsonl")}, plan)


def _samples(job: DraftJob, answers: list[Path], output: Path) -> dict[str, Any]:
    reduced = {} if job.vocabulary is None else {"draft_vocab_size": job.vocabulary, "fill_vocabulary": True}
    return {"data": list(map(str, answers)), "output": str(output), **reduced}


def _stage(
    job: DraftJob, key: str, what: str, command: str, argument: str, options: dict[str, Any],
    plan: DraftPlan | None = None,
) -> Stage:  # fmt: skip
    threads = {} if job.threads is None else {"threads": job.threads}
    if plan is None:
        return Stage(key, what, command, argument, options | threads, 0.0)
    estimate = plan.seconds["answers" if key in ("greedy", "sampled") else key.partition(" ")[0]]
    return Stage(key, what, command, argument, options | threads, estimate)
