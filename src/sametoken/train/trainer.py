"""Training loop over packed documents, with evaluations of held-out acceptance; resumable bit for bit.

The number of a step determines its rows and learning rate (`schedule`), so a run that continues from a checkpoint has
the same results as one without interruption.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from sametoken.checkpoint.paths import user_path
from sametoken.checkpoint.places import draft_directory
from sametoken.data.synthesize import derived_seed
from sametoken.errors import CheckpointError, SametokenError
from sametoken.files import make_directory
from sametoken.interrupt import Stop
from sametoken.learning.batch import Batch, guess_weights
from sametoken.learning.loss import AcceptanceMetrics
from sametoken.learning.objective import Objective
from sametoken.learning.target import Features
from sametoken.train import checkpoints
from sametoken.train.checkpoints import EVALUATED, Best, Saved, evaluated_by
from sametoken.train.dataset.prepared import SAMPLES, Prepared
from sametoken.train.journal import Journal, Window
from sametoken.train.optimisers import optimisers
from sametoken.train.parallel import Parallel, restore, whole_states
from sametoken.train.schedule import Schedule, Step
from sametoken.train.settings import TrainingSettings
from sametoken.train.targets import BatchSource

T = TypeVar("T")
Evaluator = Callable[[Path], float]  # from the directory of a draft to its acceptance length on held-out prompts


class RunInputs(NamedTuple):
    """Inputs of a run.

    Attributes:
        objective: objective with the draft.
        source: source of the target's hidden states.
        data: prepared samples.
        dtype: dtype of computations.
    """

    objective: Objective
    source: BatchSource
    data: Prepared
    dtype: torch.dtype


class Outcome(NamedTuple):
    """Outcome of a run.

    Attributes:
        head: directory of the trained head.
        steps: steps of the optimiser, earlier runs included.
        total: steps of the whole run.
        best: held-out acceptance length of the head, None if it was not evaluated.
        before: acceptance lengths of the head from which quantisation-aware training started: plain, and rounded.
        stopped_early: true if training ended because evaluations did not improve.
        stopped: true if a signal ended training; the checkpoint has the state.
        tokens_per_second: tokens of documents per second in this run, without evaluations.
    """

    head: Path
    steps: int
    total: int
    best: float | None
    before: tuple[float, float] | None
    stopped_early: bool
    stopped: bool
    tokens_per_second: float


class Trainer:
    """Training run.

    Args:
        plan: complete settings, from `defaults.filled`.
        evaluator: function that evaluates a head on held-out prompts in the main process, None for none.
        tell: called with progress messages.
        stop: once true in any process, training ends after the step, with a checkpoint.

    Raises:
        CheckpointError: the checkpoint to continue from is damaged or has other settings.
        DataError: the data are too few.
    """

    def __init__(
        self, plan: TrainingSettings, inputs: RunInputs, parallel: Parallel, evaluator: Evaluator | None = None,
        tell: Callable[[str], None] = lambda line: None, stop: Stop | None = None,
    ) -> None:  # fmt: skip
        self.plan, self.inputs, self.parallel, self._evaluator, self._tell = plan, inputs, parallel, evaluator, tell
        self._stop, self._stopping = Stop() if stop is None else stop, False
        self.directory = user_path(plan.keep.output_dir)
        self._lengths = inputs.data.lengths()
        self.schedule = Schedule(self._lengths, plan.run, parallel.count)
        self.objective = inputs.objective
        self._part = plan.head.training.part
        if parallel.main:
            make_directory(self.directory)
            checkpoints.sweep(self.directory, self._part)
        self._best = Best(self.directory / self._part)
        self.model = parallel.wrap(self.objective)
        self.optimisers = optimisers(self.model, plan.run.optim or "adamw", plan.run.weight_decay)
        self.progress: dict[str, Any] = {"step": 0, "best": None, "judged": 0, "stale": 0, "ended": False}
        self._resume()

    def run(self) -> Outcome:
        """Train to the last step, or until evaluations have not improved for long enough."""
        journal = Journal(self.directory, self.progress["step"]) if self.parallel.main else None
        window = Window()
        try:
            with self._stop.noticed():
                self._evaluate_existing(journal)
                self._evaluate_start(journal)
                self._go_on(journal, window)
        finally:
            if journal is not None:
                journal.close()
        best = self._best.acceptance if self.parallel.main else self.progress["best"]
        step, ended = self.progress["step"], self.progress["ended"]
        stopped = self._stopping and not ended and (step < self.schedule.total or self._evaluation_due())
        start = self.progress.get("plain"), self.progress.get("rounded")
        before = None if start[0] is None or start[1] is None else (start[0], start[1])
        return Outcome(self._best.place, step, self.schedule.total, best, before, ended, stopped, window.overall)

    def _go_on(self, journal: Journal | None, window: Window) -> None:
        keep = self.plan.keep
        assert keep.save_steps is not None
        for step in self.schedule.steps(self.progress["step"]):
            if self.progress["ended"] or self._stopping:
                break
            window.add(self._step(step), sum(self._lengths[sample] for row in step.rows for sample in row))
            self.progress["step"] = done = step.number + 1
            last = done == self.schedule.total
            if done % keep.logging_steps == 0 or last:
                self._log(journal, step, window)
            evaluates = self._evaluation_due()
            if evaluates or last or self._stopping or done % keep.save_steps == 0:
                self._save()
            if evaluates and not self._stopping:
                self._evaluate_head(journal)
            window.go_on()

    def _step(self, step: Step) -> AcceptanceMetrics:
        """Perform one step of the optimiser; return this process's share of the metrics."""
        run, parallel = self.plan.run, self.parallel
        mine = step.rows[parallel.rank :: parallel.count]
        at_once = run.train_bs or 1
        forwards = [mine[i : i + at_once] for i in range(0, len(mine), at_once)]
        own = len(forwards)
        if parallel.in_step:  # a process with fewer rows than the first repeats rows with weight 0
            forwards += forwards[:1] * (-(-len(step.rows[:: parallel.count]) // at_once) - own)
        batches = [self._batch(rows, step.epoch) for rows in forwards]
        rule = self.plan.loss
        steps, by_document = self.objective.steps, rule.loss_mean == "document"
        weighed = [guess_weights(each, steps, rule.decay, per_document=by_document) for each, _ in batches]
        documents = torch.stack([each.total for each in weighed[:own]]).sum()
        total, stops = parallel.sum(torch.stack([documents, documents.new_tensor(float(bool(self._stop)))]))
        total, self._stopping = total.clamp(min=1), bool(stops > 0)
        self.model.zero_grad(set_to_none=True)
        reports: list[AcceptanceMetrics] = []
        for i, ((batch, samples), guesses) in enumerate(zip(batches, weighed, strict=True)):
            features = self._features(batch, samples)
            with parallel.waiting(self.model, i + 1 < len(batches)):
                # Data parallelism averages over the processes, but the weights are already shares of the whole step.
                share = parallel.count / total if i < own else torch.zeros_like(total)
                loss, report = self.model(batch, features, guesses.weights * share)
                loss.backward()
            reports += [report] if i < own else []
        self._norm = parallel.clip(self.model, run.max_grad_norm)
        self._check_norm(step)
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = self.schedule.rate(step.number)
            optimiser.step()
        return reduce(AcceptanceMetrics.__add__, reports)

    def _check_norm(self, step: Step) -> None:
        if not math.isfinite(self._norm):
            raise SametokenError(
                f"step {step.number + 1}: the norm of the gradients is {self._norm}, expected a finite number; "
                f"{self.directory} keeps what was saved before: start anew in another --output-dir with an --lr below "
                f"{self.plan.run.lr}"
            )

    def _batch(self, rows: Sequence[Sequence[int]], epoch: int) -> tuple[Batch, list[int]]:
        samples = [sample for row in rows for sample in row]
        documents = [self.inputs.data[sample] for sample in samples]
        # The draws of a sample depend on the run's seed, the epoch and the sample, not on the batch.
        seeds = torch.tensor([derived_seed(self.plan.run.seed, epoch, sample) for sample in samples])
        batch = Batch.of([(each.tokens, each.mask) for each in documents], self.parallel.device, seeds)
        return self.objective.rewritten(batch), samples

    def _features(self, batch: Batch, samples: Sequence[int]) -> Features:
        parts = torch.split(batch.tokens, list(batch.lengths))
        return self.inputs.source(samples, parts)

    def _log(self, journal: Journal | None, step: Step, window: Window) -> None:
        report = AcceptanceMetrics(*self.parallel.sum(torch.stack(window.take())))
        if journal is None:
            return
        counted = report.counted.clamp(min=1)
        values = {
            "epoch": step.epoch,
            "loss": float((report.loss / counted).mean()),
            "losses": (report.loss / counted).tolist(),
            "accuracy": (report.path / report.reached.clamp(min=1)).tolist(),
            "acceptance": (report.acceptance / counted).tolist(),
            "acceptance_length": report.acceptance_length,
            "learning_rate": self.schedule.rate(step.number),
            "gradient_norm": self._norm,
            "tokens_per_second": window.rate,
        }
        done = step.number + 1
        journal.write(done, values)
        self._tell(
            f"step {done}/{self.schedule.total}  loss {values['loss']:.3f}  acceptance length about "
            f"{values['acceptance_length']:.2f}  {window.rate:.0f} tokens/s"
        )

    def _evaluation_due(self) -> bool:
        """True if an evaluation of the current head is due."""
        keep, done = self.plan.keep, self.progress["step"]
        if self._evaluator is None or keep.eval_steps is None or done <= self.progress["judged"]:
            return False
        return done % keep.eval_steps == 0 or (done == self.schedule.total and keep.do_eval)

    def _evaluate_existing(self, journal: Journal | None) -> None:
        """Evaluate an existing head that has no evaluation under these conditions, and repeat an interrupted one."""
        if self._evaluator is None:
            return
        conditions = evaluated_by(self.plan.keep)
        if self.parallel.main and not self._best.comparable(conditions):
            found = self._measured(lambda measure: measure(self._best.place))
            if found is not None:
                self._best.note(found, conditions)
                self._tell(f"{self._best.place}: held-out acceptance length {found:.3f}; only a better one replaces it")
        self._stopping = self.parallel.agreed(bool(self._stop))
        if self._evaluation_due() and not self._stopping:
            self._evaluate_head(journal)

    def _evaluate_start(self, journal: Journal | None) -> None:
        """Evaluate the initial head of quantisation-aware training, plain and rounded; keep the rounded one as best."""
        stored, origin = self.objective.stored, self.plan.head.init_from
        if self._evaluator is None or stored is None or origin is None or self.progress["step"] or self._stopping:
            return
        weights, _ = whole_states(self.objective, self.optimisers)
        found = None
        if journal is not None:
            place = draft_directory(origin)
            found = self._measured(lambda measure: (measure(place), self._evaluated_elsewhere(measure, weights)))
        found = self.parallel.agreed(found)
        if found is None:
            self._stopping = True
            return
        plain, rounded = found
        self.progress |= {"best": rounded, "plain": plain, "rounded": rounded}
        if journal is not None:
            self._best.offer(rounded, evaluated_by(self.plan.keep), lambda place: self.objective.write(place, weights))
            journal.write(0, {"eval_acceptance_length": rounded, "plain_acceptance_length": plain})
            self._tell(f"held-out acceptance length of {origin}: {plain:.3f}, rounded to {stored.format} {rounded:.3f}")
        self.parallel.agreed(None)

    def _measured(self, how: Callable[[Evaluator], T]) -> T | None:
        """Result of the evaluator; None if a signal interrupts the evaluation."""
        assert self._evaluator is not None
        try:
            with self._stop.at_once():
                return how(self._evaluator)
        except KeyboardInterrupt:
            return None

    def _evaluate_head(self, journal: Journal | None) -> None:
        """Evaluate the head on held-out prompts, keep it if it is the best, and decide on early stopping."""
        weights, _ = whole_states(self.objective, self.optimisers)
        found = None
        if journal is not None and self._evaluator is not None:
            found = self._measured(lambda measure: self._evaluated_elsewhere(measure, weights))
        found = self.parallel.agreed(found)
        if found is None:
            self._stopping = True
            return
        best, patience = self.progress["best"], self.plan.keep.patience
        better = best is None or found > best
        stale = 0 if better else self.progress["stale"] + 1
        self.progress |= {"best": found if better else best, "stale": stale, "judged": self.progress["step"]}
        self.progress["ended"] = patience is not None and stale >= patience
        if journal is not None:
            self._best.offer(found, evaluated_by(self.plan.keep), lambda place: self.objective.write(place, weights))
            checkpoints.note(self.directory, self.progress)
            journal.write(self.progress["step"], {"eval_acceptance_length": found})
            self._tell(f"step {self.progress['step']}  held-out acceptance length {found:.3f}")
        self.parallel.agreed(None)

    def _evaluated_elsewhere(self, measure: Evaluator, weights: Mapping[str, torch.Tensor]) -> float:
        """Evaluate weights in a temporary directory."""
        with tempfile.TemporaryDirectory(dir=self.directory, prefix=EVALUATED) as place:
            self.objective.write(Path(place) / self._part, weights)
            return measure(Path(place) / self._part)

    def _save(self) -> None:
        weights, moments = whole_states(self.objective, self.optimisers)
        if self.parallel.main:
            saved = Saved(weights, moments, self.progress, self._settings())
            checkpoints.save(self.directory, self.progress["step"], saved, self.plan.keep.save_total_limit)
            if self._evaluator is None and self._best.acceptance is None:
                self.objective.write(self._best.place, weights)
        self.parallel.agreed(None)

    def _settings(self) -> dict[str, Any]:
        """Settings that decide the results of the run, as JSON values."""
        data = self.inputs.data.manifest
        return self.plan.deciding() | {
            "rows_per_step": self.schedule.rows_per_step,
            "samples": data.files[SAMPLES].sha256,
            "target": data.origin.target_digest,
            "computed_in": str(self.inputs.dtype).removeprefix("torch."),
        }

    def _resume(self) -> None:
        """Continue from the last checkpoint, which the main process reads for all."""
        saved = self._last_checkpoint() if self.parallel.main else None
        progress = self.parallel.agreed(None if saved is None else saved.progress)
        if progress is None:
            return
        weights = self.parallel.sent({} if saved is None else saved.weights)
        moments = self.parallel.sent({} if saved is None else saved.optimiser)
        place = self.directory / f"checkpoint-{progress['step']}"
        try:
            restore(self.objective, self.optimisers, weights, moments)
        except CheckpointError as error:
            raise CheckpointError(f"{place}: {error.problem}; delete {place} to go on from the one before") from error
        self.progress = dict(progress)

    def _last_checkpoint(self) -> Saved | None:
        last = checkpoints.last(self.directory, resume=self.plan.keep.resume)
        if last is not None:
            saved = checkpoints.load(last, self._settings())
            self._tell(f"going on from {last}")
            return saved
        if self._best.place.exists() and self._evaluator is None:
            raise SametokenError(
                f"{self._best.place} is a head of an earlier run without a checkpoint to go on from; give "
                "--eval-data, so that the better one is kept, move it away, or choose another --output-dir"
            )
        return None
