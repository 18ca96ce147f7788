"""Defaults of a run, from the kind of draft, the target's width and the amount of data.

Pure functions from settings and lengths to settings and messages. docs/training.md has the measurements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from sametoken.options.declaration import Settings
from sametoken.train.schedule import rows_of, rows_per_step, steps_of_run
from sametoken.train.settings import ROW, HeadSettings, LossSettings, RunSettings, TrainingSettings

STEPS = 600  # minimum that epochs are added for
MOST_EPOCHS = 20  # for few data, which a head overfits
FEW_STEPS = 300  # with fewer, a head is hardly accepted
MOST_STEPS = 8000  # with more, a step takes more rows instead
ROWS_AT_ONCE = 8  # per forward
WIDTH = 256  # of the target for which the rates were measured
RATE = {"muon": 5e-3, "adamw": 1e-3}
# Exponents by which rates fall with the width: keeps the relative size of a matrix's updates.
SHRINKS = {"muon": 0.5, "adamw": 1.0}
EVALUATIONS = 8  # of a run


class Facts(NamedTuple):
    """Properties of a run from which defaults are chosen.

    Attributes:
        lengths: number of tokens of each sample.
        width: hidden size of the target.
        processes: number of processes that share each step.
    """

    lengths: Sequence[int]
    width: int
    processes: int


def filled(plan: TrainingSettings, facts: Facts) -> tuple[TrainingSettings, list[str]]:
    """Fill every setting of the plan except those for which None has a meaning; return messages for the user too.

    Given values are kept. Equal settings and data give equal plans, independent of the number of processes unless a
    step has fewer rows than processes.
    """
    head, loss = _of_kind(plan.head, plan.loss)
    run, why = _optimiser(plan.run, facts.width)
    rows = len(rows_of(facts.lengths, run, 0))
    run = _amount(run, rows, facts.processes)
    total = steps_of_run(run, rows, facts.processes)
    cadence = max(1, min(500, math.ceil(total / EVALUATIONS)))
    chosen = {"eval_steps": cadence, "save_steps": cadence}
    keep = plan.keep.model_copy(
        update={name: value for name, value in chosen.items() if getattr(plan.keep, name) is None}
    )
    per_step = rows_per_step(run, facts.processes)
    amount = f"{sum(facts.lengths)} tokens in {rows} rows of {run.training_seq_len or ROW}"
    length = f"{run.num_epochs:g} epochs, {per_step} row{'s' * (per_step > 1)} a step, {total} steps"
    said = [
        f"{plan.head.method}: {len(facts.lengths)} samples, {amount}; {length}; {run.optim}{why}, learning rate "
        f"{run.lr:.3g}"
    ]
    if total < FEW_STEPS:
        said.append(_warning(plan.run, total, per_step))
    return TrainingSettings(head, loss, run, keep), said


def _of_kind(head: HeadSettings, loss: LossSettings) -> tuple[HeadSettings, LossSettings]:
    """Fill missing options with the defaults of the kind."""
    chosen = head.training.defaults(head)

    def missing(group: Settings) -> dict[str, Any]:
        fields = type(group).model_fields
        return {name: value for name, value in chosen.items() if name in fields and getattr(group, name) is None}

    return head.model_copy(update=missing(head)), loss.model_copy(update=missing(loss))


def _optimiser(run: RunSettings, width: int) -> tuple[RunSettings, str]:
    """Fill optimiser and learning rate; return the reason if AdamW was chosen here."""
    optim, why = run.optim, ""
    if optim is None and run.lr is not None:
        optim, why = "adamw", " (since --lr is given without --optim)"
    optim = optim or "muon"
    rate = RATE[optim] * min(1.0, WIDTH / width) ** SHRINKS[optim]
    return run.model_copy(update={"optim": optim, "lr": rate if run.lr is None else run.lr}), why


def _amount(run: RunSettings, rows: int, processes: int) -> RunSettings:
    """Fill epochs, rows per forward and forwards per step."""
    epochs = run.num_epochs
    if epochs is None:
        epochs = float(max(1, min(MOST_EPOCHS, math.ceil(STEPS / rows))))
    bs, forwards = run.train_bs, run.gradient_accumulation_steps
    if bs is None and forwards is None:
        wanted = 2 ** max(0, math.floor(math.log2(max(1.0, rows * epochs / MOST_STEPS))))
        each = max(1, math.ceil(wanted / processes))
        bs = min(each, ROWS_AT_ONCE)
        forwards = math.ceil(each / bs)
    run = run.model_copy(update={"train_bs": bs or 1, "gradient_accumulation_steps": forwards or 1})
    if run.num_epochs is None and run.max_steps is not None:  # which alone determines the length
        epochs = float(math.ceil(run.max_steps * rows_per_step(run, processes) / rows) + 1)
    return run.model_copy(update={"num_epochs": epochs})


def _warning(given: RunSettings, total: int, per_step: int) -> str:
    """Warning about a run that is too short, with a remedy; "" if it is long enough."""
    ways = ["add data"]
    if given.max_steps == total:
        ways = ["raise --max-steps"]
    else:
        ways += ["raise --num-epochs"]
        if per_step > 1:
            ways += ["lower --train-bs or --gradient-accumulation-steps"]
        if (given.training_seq_len or 0) > ROW:
            ways += ["shorten --training-seq-len"]
    return (
        f"warning: only {total} steps; expected {FEW_STEPS} or more for a head that is accepted: {', or '.join(ways)}"
    )
