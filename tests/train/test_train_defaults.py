"""What a run does without options: settings that follow from the data, sentences about them, and options that stay."""

from __future__ import annotations

import pytest

from sametoken.errors import DataError
from sametoken.train.defaults import FEW_STEPS, MOST_EPOCHS, STEPS, Facts, filled
from sametoken.train.schedule import Schedule, rows_of
from sametoken.train.settings import HeadSettings, KeepSettings, LossSettings, RunSettings, TrainingSettings
from training_checks import TAPS, log_of, write_conversations

GROUPS = (HeadSettings, LossSettings, RunSettings, KeepSettings)
SELF_PROMPTED = [40 + 7 * (i % 12) for i in range(2000)]  # the amount that the README makes: 157 000 tokens


def plan_of(**chosen) -> TrainingSettings:
    return TrainingSettings(
        *(group(**{k: v for k, v in chosen.items() if k in group.model_fields}) for group in GROUPS)
    )


def fill(lengths=SELF_PROMPTED, width=256, processes=1, **chosen) -> tuple[TrainingSettings, list[str], Schedule]:
    plan, said = filled(plan_of(**chosen), Facts(lengths, width, processes))
    return plan, said, Schedule(lengths, plan.run, processes)


def test_two_thousand_conversations_get_the_measured_recipe():
    plan, said, course = fill()
    head, loss, run, keep = plan
    assert (head.fc_norm, head.norm_output, loss.ttt_steps, loss.decay) == (True, True, 3, 1.0)
    assert (run.optim, run.lr, run.train_bs, run.lr_scheduler_type) == ("muon", 5e-3, 1, "cosine")
    assert STEPS <= course.total < 1.5 * STEPS
    assert len(rows_of(SELF_PROMPTED, run, 0)) * run.num_epochs == course.total
    assert keep.eval_steps == keep.save_steps == -(-course.total // 8)
    (line,) = said
    assert f"eagle3: 2000 samples, {sum(SELF_PROMPTED)} tokens" in line
    assert f"{course.total} steps; muon, learning rate 0.005" in line


@pytest.mark.parametrize("mode", ["eagle", "eagle3", "eagle1", "medusa", "draft"])
@pytest.mark.parametrize("count", [1, 20, 100, 2000, pytest.param(300_000, marks=pytest.mark.thorough)])
def test_every_amount_of_data_gets_enough_steps_and_not_too_many(mode, count):
    plan, said, course = fill([80 + i % 40 for i in range(count)], mode=mode)
    assert 1 <= plan.run.num_epochs <= MOST_EPOCHS
    assert course.total <= 16_000
    assert course.total >= FEW_STEPS or count <= 20
    assert (len(said) == 2) == (course.total < FEW_STEPS)
    assert plan.run.train_bs * plan.run.gradient_accumulation_steps == course.rows_per_step
    if count == 300_000:
        assert course.rows_per_step > 1
        assert plan.run.num_epochs == 1


@pytest.mark.parametrize(
    ("chosen", "advice"),
    [
        ({"max_steps": 26}, "raise --max-steps"),
        ({"num_epochs": 1, "train_bs": 4, "training_seq_len": 2048}, "raise --num-epochs, or lower --train-bs"),
        ({"num_epochs": 1, "training_seq_len": 2048}, "or shorten --training-seq-len"),
    ],
)
def test_a_short_run_is_warned_of_with_what_would_help(chosen, advice):
    _, said, course = fill(**chosen)
    assert course.total < FEW_STEPS
    assert f"warning: only {course.total} steps" in said[1]
    assert advice in said[1]


def test_what_was_given_stays():
    given = {
        "fc_norm": False, "norm_output": False, "ttt_steps": 7, "loss_decay": 0.8, "optim": "adamw", "lr": 1e-4,
        "num_epochs": 1.0, "train_bs": 4, "training_seq_len": 2048, "gradient_accumulation_steps": 1,
        "eval_steps": 500, "save_steps": 1000,
    }  # fmt: skip
    plan, _, course = fill(**given)
    values = {name: value for group in plan for name, value in group.model_dump().items()}
    assert {name: values[name] for name in given} == given
    rows = len(rows_of(SELF_PROMPTED, plan.run, 0))
    assert (course.total, course.rows_per_step) == (-(-rows // 4), 4)


def test_steps_that_were_given_are_made_whatever_the_data():
    assert fill([50] * 10, max_steps=700)[2].total == 700
    assert fill([50] * 10, max_steps=700, num_epochs=2)[2].total == 2


def test_muon_gives_way_and_it_is_said():
    plan, said, _ = fill(fsdp=True, processes=2)  # sharded matrices have it too
    assert (plan.run.optim, plan.run.lr) == ("muon", 5e-3)
    plan, said, _ = fill(lr=1e-5)  # a rate from elsewhere is AdamW's
    assert (plan.run.optim, plan.run.lr) == ("adamw", 1e-5)
    assert "adamw (since --lr is given without --optim), learning rate 1e-05" in said[0]
    assert fill(lr=1e-3, optim="muon")[0].run.optim == "muon"


def test_rates_fall_with_the_width_of_the_target():
    assert fill(width=4096)[0].run.lr == pytest.approx(5e-3 / 4)
    assert fill(width=4096, optim="adamw")[0].run.lr == pytest.approx(1e-3 / 16)
    assert fill(width=64)[0].run.lr == 5e-3


@pytest.mark.parametrize(
    "processes", [pytest.param(1, marks=pytest.mark.thorough), 2, pytest.param(4, marks=pytest.mark.thorough)]
)
def test_processes_share_the_rows_of_a_step(processes):
    lengths = [500] * 40_000
    plan, _, course = fill(lengths, processes=processes)
    assert course.rows_per_step == 4
    assert plan.run.train_bs == 4 // processes


def test_a_head_of_another_architecture_keeps_it():
    assert fill(norm_before_fc=True)[0].head.fc_norm is False  # which no engine serves together
    kept = fill(init_from="head")[0].head
    assert (kept.fc_norm, kept.norm_output) == (None, None)
    assert fill(mode="medusa")[0].head.fc_norm is None


def test_long_samples_are_rows_of_their_own_unless_a_length_was_given():
    lengths = [2000, 100, 100, 300, 513]
    rows = rows_of(lengths, plan_of().run, 0)
    assert sorted(map(sorted, rows)) == [[0], [1, 2, 3], [4]]
    with pytest.raises(DataError, match="sample 0 has 2000 tokens, a row only 512"):
        rows_of(lengths, plan_of(training_seq_len=512).run, 0)


@pytest.mark.thorough
@pytest.mark.usefixtures("one_thread")
def test_a_run_without_options_says_what_it_does_and_is_judged_as_evaluate_does(pair, tmp_path, run):
    data = write_conversations(tmp_path / "chat.jsonl", 100)
    held_out = write_conversations(tmp_path / "held-out.jsonl", 90)
    out = tmp_path / "out"
    done = run("train", pair.target, "--data", str(data), "--taps", TAPS, "--eval-data", str(held_out),
               "--eval-steps", "12", "--max-steps", "24", "--output-dir", str(out), "--threads", "1")  # fmt: skip
    assert done.code == 0, done.err
    assert "eagle3: 100 samples" in done.err
    assert "warning: only 24 steps" in done.err
    judged = [entry["eval_acceptance_length"] for entry in log_of(out) if "eval_acceptance_length" in entry]
    assert len(judged) == 2
    command = next(line for line in done.err.splitlines() if "sametoken evaluate" in line).partition("sametoken ")[2]
    again = run(*command.split(), "--threads", "1")
    assert f"acceptance length {max(judged):.3f}" in again.out
    assert f"held-out acceptance length {max(judged):.3f}" in done.out
