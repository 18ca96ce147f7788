"""Course of `sametoken draft`: measurement, plan, the stages in turn with their progress, choice of the head."""

from __future__ import annotations

import gc
import json
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from statistics import median
from typing import Any

from sametoken.checkpoint.hub import read_config
from sametoken.checkpoint.places import target_directory
from sametoken.commands.draft_card import mean_speed_up, write_card
from sametoken.commands.draft_stages import (
    FORMATS,
    TRAINED,
    DraftJob,
    DraftState,
    Stage,
    check,
    evaluations,
    left_out,
    measurements,
    stages,
    written,
)
from sametoken.commands.terminal import tell
from sametoken.data.held_out import divide, sort_lines
from sametoken.errors import SametokenError
from sametoken.files import new_directory
from sametoken.learning.modes import MODES
from sametoken.model.config import ModelConfig
from sametoken.train.budget import DraftPlan, Limits, Rates, epochs_left, plan, spell_time
from sametoken.train.dataset.extraction import parse_taps

EVERY_S = 60  # seconds between two lines of progress
MOST_HELD_OUT = 80


def _steady(job: DraftJob) -> float:
    """Tokens per second of the measured training, without its first step, which sets up."""
    log = job.out / "measured" / "training" / "log.jsonl"
    return float(
        median(json.loads(line)["tokens_per_second"] for line in log.read_text(encoding="utf-8").splitlines()[1:])
    )


class DraftRun:
    """A run, from the first stage that is not finished.

    Args:
        state: state of the directory `job.out`.
        budget_s: seconds for everything.
    """

    def __init__(self, job: DraftJob, state: DraftState, budget_s: float) -> None:
        self._job, self._state, self._budget_s = job, state, budget_s
        state.check_budget(budget_s)
        self._before, self._began = float(state.content["spent_s"]), time.monotonic()

    @property
    def spent_s(self) -> float:
        """Seconds of this process, and of finished stages in earlier ones."""
        return self._before + time.monotonic() - self._began

    def go(self) -> int:
        """Run the stages that are left; return 0, or the exit code of a stage that was stopped.

        Raises:
            ConfigError: the budget is too small. SametokenError: a stage failed.
        """
        if code := self._measure():
            return code
        made = self._plan()
        for stage in stages(self._job, made, self._tokens(made)):
            if stage.key == "train":
                made = self._fit(made)
                break
            if code := self._do(stage):
                return code
        for stage in stages(self._job, made, self._tokens(made)):
            if code := self._do(stage):
                return code
        self._choose()
        for stage in evaluations(self._job, made):
            if code := self._do(stage):
                return code
        lines = [stage.line for stage in (*stages(self._job, made, self._tokens(made)), *evaluations(self._job, made))]
        write_card(self._job, self._state, lines)
        shutil.rmtree(self._job.out / "measured", ignore_errors=True)
        return 0

    def _measure(self) -> int:
        """Measure the speed of the stages, and divide given data; once in a run."""
        if "rates" in self._state.content:
            return 0
        job = self._job
        available = None
        if job.data:
            places = job.held_out, job.prompts("greedy"), job.prompts("sampled")
            available = divide(job.data, MOST_HELD_OUT, places)[1]
        tell(f"{job.model}: measuring how fast each stage is")
        shutil.rmtree(job.out / "measured", ignore_errors=True)
        found: dict[str, dict[str, Any]] = {}
        seconds: dict[str, float] = {}
        for stage in measurements(job):
            began = time.monotonic()
            tell(f"  {stage.title}")
            with redirect_stderr(StringIO()):  # a short training warns that it is short
                code, found[stage.key] = stage.run()
            if code > 1:
                return code
            check(stage, code, found[stage.key])
            seconds[stage.key] = time.monotonic() - began
            gc.collect()
        answers, samples = found["answers"], found["prepare"]
        rates = Rates(
            load_s=max(0.1, seconds["prepare"] - samples["hidden_states_s"]),
            conversation_s=answers["seconds"] / answers["written"],
            conversation_tokens=samples["tokens"] / samples["samples"],
            answer_tokens=answers["tokens"] / answers["written"],
            hidden=samples["tokens"] / samples["hidden_states_s"],
            training=_steady(job),
        )
        self._state.note(self.spent_s, rates=rates._asdict(), available=available)
        return 0

    def _plan(self) -> DraftPlan:
        """Plan of the run, which is made and printed once and then kept."""
        state, job = self._state, self._job
        rates = Rates(**state.content["rates"])
        if "plan" in state.content:
            tell(f"going on in {job.out}, after {len(state.results)} finished stages")
            return DraftPlan(**state.content["plan"])
        config = ModelConfig.from_hf(read_config(target_directory(job.model)))
        states = len(parse_taps(MODES[0], config.num_layers)) + 1
        free = shutil.disk_usage(job.out).free
        limits = Limits(self._budget_s, self.spent_s, state.content["available"], free, 2 * states * config.hidden_size)
        made = plan(rates, limits)
        state.note(self.spent_s, plan=made._asdict(), budget_s=self._budget_s, planned_s=self.spent_s)
        tell(
            f"plan for {spell_time(self._budget_s)}, by {rates.answer_tokens / rates.conversation_s:.0f} tokens/s of "
            f"answers, {rates.hidden:.0f} of hidden states and {rates.training:.0f} of training:"
        )
        for stage in (*stages(job, made, self._tokens(made)), *evaluations(job, made)):
            tell(f"  {stage.title}: about {spell_time(stage.seconds)}\n    {stage.line}")
        return made

    def _tokens(self, made: DraftPlan) -> int:
        """Tokens of the samples, estimated until they are there."""
        prepared = self._state.results.get("prepare")
        if prepared is not None:
            return int(prepared["tokens"])
        return round(made.conversations * float(self._state.content["rates"]["conversation_tokens"]))

    def _fit(self, made: DraftPlan) -> DraftPlan:
        """Plan with the epochs for which there is time when training begins; decided once."""
        state = self._state
        if "fitted" not in state.content:
            rates, tokens = Rates(**state.content["rates"]), self._tokens(made)
            took_s = self.spent_s - state.content["planned_s"]
            epochs = epochs_left(made, rates, tokens, self._budget_s - self.spent_s, took_s)
            state.note(self.spent_s, plan=made._replace(epochs=round(epochs, 2))._asdict(), fitted=True)
        return DraftPlan(**state.content["plan"])

    def _do(self, stage: Stage) -> int:
        """Run a stage unless it is finished; return the exit code of one that was stopped, otherwise 0."""
        state = self._state
        if stage.key in state.results:
            return 0
        if stage.command == "bench" and state.results.get(stage.key.replace("bench", "quantize"), {}) is None:
            return 0  # the head was not written in this format
        tell(f"[{self._clock()}] {stage.title}: about {spell_time(stage.seconds)}")
        try:
            with self._ticking(stage):
                code, record = stage.run()
        except SametokenError as error:
            if not left_out(stage, error):
                raise
            tell(f"{stage.title} is left out: {error}")
            state.finish(stage.key, None, self.spent_s)
            return 0
        check(stage, code, record)
        if code > 1:
            return code
        if stage.command == "synthesize":
            sort_lines(self._job.out / f"{stage.key}.jsonl")
        state.finish(stage.key, record, self.spent_s)
        gc.collect()
        return 0

    def _clock(self) -> str:
        return f"{spell_time(self.spent_s)} of {spell_time(self._budget_s)}"

    @contextmanager
    def _ticking(self, stage: Stage) -> Iterator[None]:
        """Print a line now and then within the block."""
        done, began = threading.Event(), time.monotonic()

        def tick() -> None:
            while not done.wait(EVERY_S):
                left = stage.seconds - (time.monotonic() - began)
                so_far = f"about {spell_time(left)} left" if left > 0 else "it takes longer than planned"
                tell(f"[{self._clock()}] {stage.title}: {so_far}")

        thread = threading.Thread(target=tick, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _choose(self) -> None:
        """Copy the head with the greatest mean speed-up to `job.head`; once in a run."""
        results = self._state.results
        if "chosen" in self._state.content:
            return
        forms = [form for form in (TRAINED, *FORMATS) if results.get(f"bench {form}") is not None]
        best = max(forms, key=lambda form: mean_speed_up(results[f"bench {form}"]))
        with new_directory(self._job.head, replace=True) as place:
            for file in written(self._job, best).iterdir():
                shutil.copyfile(file, place / file.name)
        self._state.note(self.spent_s, chosen=best)
        tell(f"the fastest head is {best}")
