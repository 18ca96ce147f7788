"""Predictions equal the formula they stand on; a cause of slowness is found where it was built in, and only there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench_checks import PLAIN_S, cell, changed, cheap, contexts, run_of, with_controller
from sametoken.bench.explain import explain
from sametoken.bench.predict import Outlook
from sametoken.bench.record import Load
from sametoken.bench.variant import Estimate, Expectation, Spread
from sametoken.errors import ConfigError

HALF = [0.5] * 16
GOOD = [0.9] * 16
HOST_S = 0.0001


def linear(length: int) -> tuple[float, float]:
    """One millisecond a guess for drafting, a tenth for verifying it."""
    return 0.001 * length, PLAIN_S + 0.0001 * length


def formula(length: int, accepted: float) -> float:
    """Speed-up of decoding where every guess is accepted with the same probability."""
    tokens = sum(accepted**k for k in range(length + 1))
    draft_s, verify_s = linear(length)
    return tokens * (PLAIN_S + HOST_S) / (draft_s + verify_s + HOST_S)


@pytest.mark.parametrize("accepted", [0.3, 0.5, 0.8])
@pytest.mark.parametrize("lengths", [[4], [2, 8], [1, 2, 4]])
def test_other_draft_lengths_are_predicted(lengths: list[int], accepted: float) -> None:
    outlook = Outlook.of(cell(lengths, [accepted] * 16, linear))
    assert outlook is not None
    for length in range(1, 2 * max(lengths) + 1):
        found = outlook.predict(length)
        assert found.basis == ("measured" if length in lengths else "estimated")
        assert found.tokens_per_row == pytest.approx(sum(accepted**k for k in range(length + 1)), rel=0.02)
        assert found.step_s == pytest.approx(sum(linear(length)) + HOST_S)
        assert found.speed_up == pytest.approx(formula(length, accepted), rel=0.03)


def test_prompts_bound_what_is_predicted() -> None:
    made = changed(cell([2], GOOD), 0, prompt_share=0.5)
    outlook = Outlook.of(made)
    assert outlook is not None
    assert outlook.modelled(16) < 2


def test_the_table_ends_where_longer_drafts_get_worse() -> None:
    outlook = Outlook.of(cell([2], HALF, linear))
    assert outlook is not None
    assert [line.draft_len for line in outlook.table()] == [1, 2, 3]
    rising = Outlook.of(cell([2], [0.99] * 16))
    assert rising is not None
    assert [line.draft_len for line in rising.table()] == [1, 2, 3, 4]


def test_without_decoding_steps_nothing_is_predicted() -> None:
    made = changed(cell([2], HALF), 1, steps=[])
    assert Outlook.of(made) is None
    assert "raise --max-tokens" in explain(run_of(made))


# --- causes

CAUSES = (
    "Acceptance too low: ",
    "Seldom anything to verify",
    "Draft too expensive",
    "Acceptance too low at position",
    "Verification is not free",
    "Batch too large",
    "Context too long",
    "The host is slow",
    "Prompts dominate",
    "Slower than plain decoding in",
)


def causes(text: str) -> list[str]:
    return [cause for cause in CAUSES if cause in text]


def test_nothing_is_wrong_with_a_good_pair() -> None:
    text = explain(run_of(cell([2, 4], GOOD)))
    assert text.index("The fastest measured") < text.index("Recommended") < text.index("Its step takes")
    assert causes(text) == []
    assert "The fastest measured draft is draft_target with draft length 4" in text
    assert "measured" in text


def test_a_draft_that_knows_nothing() -> None:
    text = explain(run_of(cell([4], [0.02] * 16, linear)))
    assert "Acceptance too low: " in text
    assert "No measured draft is faster than plain decoding" in text
    assert "Recommended: no drafts here (--method none)." in text


def test_an_expensive_draft() -> None:
    text = explain(run_of(cell([4], GOOD, lambda length: (0.004 * length, PLAIN_S))))
    assert "Draft too expensive: drafting takes 61% of a step, each guess 0.40 of a plain step" in text
    assert "could not exceed 1.93x" in text  # 5 / (26.1 / 10.1)


def test_the_position_from_which_guesses_do_not_pay() -> None:
    accepted = [0.9, 0.9, 0.05, 0.05]
    text = explain(run_of(cell([4], accepted, linear)))
    assert "Acceptance too low at position 3: 4% of forwards accept that guess (5% of those that get there)" in text
    assert "Recommended: measure --max-draft-len 2, estimated at" in text


def test_a_measured_gain_outweighs_the_model_of_a_guess() -> None:
    """Noise in the cost of drafting says that the first guess does not pay; the measured speed-up says that it does."""
    made = cell([4], HALF, lambda length: (0.008 + 0.001 * length, PLAIN_S))
    made = changed(made, 1, speed_up=Estimate(1.89, 1.8, 1.98))
    text = explain(run_of(made))
    assert "at position" not in text
    assert "draft at most" not in text
    assert text.count("Recommended") == 1
    assert "4, measured at 1.89x" in text


def test_a_batch_that_fills_the_machine() -> None:
    def full(length: int) -> tuple[float, float]:
        return 0.0001 * length, PLAIN_S * (1 + length)

    small, large = cell([2], GOOD), cell([2], GOOD, full, batch=16)
    rows = [[replace(step, rows=16) for step in variant.steps] for variant in large.variants]
    large = changed(changed(large, 0, steps=rows[0]), 1, steps=rows[1])
    text = explain(run_of(small, large))
    assert causes(text.split("\n\n")[0]) == []
    assert "Batch too large to verify for free: the forward over 48 tokens costs 3.00 of the plain one over 16" in text
    assert "(it is 1.00 at batch 1)" in text


def test_gains_that_fade_with_the_context() -> None:
    made = changed(cell([2], GOOD), 0, contexts=contexts([0.01, 0.01, 0.01], [1, 1, 1]))
    made = changed(made, 1, contexts=contexts([0.01, 0.012, 0.02], [2.5, 2.0, 1.5]))
    text = explain(run_of(made))
    assert "Context too long: decoding gains 2.50x at 64 to 127 tokens and 0.75x at 4096 to 8191" in text
    steady = changed(made, 1, contexts=contexts([0.01, 0.01, 0.01], [2.5, 2.5, 2.4]))
    assert "Context" not in explain(run_of(steady))


def test_host_prompts_and_categories() -> None:
    made = cell([2], GOOD)
    best = made.variants[1]
    slow = replace(best.categories[0], name="code", speed_up=Estimate(0.8))
    made = changed(made, 1, time_share=replace(best.time_share, host=0.4), categories=[*best.categories, slow])
    made = changed(made, 0, prompt_share=0.5)
    found = explain(run_of(made))
    assert causes(found) == ["The host is slow", "Prompts dominate", "Slower than plain decoding in"]
    assert "at most 2.00x" in found
    assert "code (0.80x" in found


def test_a_drafter_that_seldom_finds_anything() -> None:
    made = cell([2], GOOD)
    found = made.variants[1].acceptance
    rare = replace(found, drafted_lengths=[found.forwards - 100, 0, 100])
    text = explain(run_of(changed(made, 1, acceptance=rare, method="ngram")))
    assert "Seldom anything to verify: 10% of decoding forwards had a draft. ngram" in text


def test_an_interval_around_one_is_no_verdict() -> None:
    made = changed(cell([2], HALF, linear), 1, speed_up=Estimate(1.02, 0.9, 1.15))
    text = explain(run_of(made))
    assert "shows no clear difference from plain decoding: 1.02x [0.90, 1.15]" in text
    assert "Recommended: measure again with more --repeat, on a machine without other work." in text


def test_other_work_on_the_machine_is_named() -> None:
    run = run_of(cell([2], GOOD))
    busy = replace(run, environment=replace(run.environment, load_after=3.2))
    assert "No conclusion: the machine was busy (load average 3.2, threads 1)" in explain(busy)
    assert "Recommended" not in explain(busy)
    assert not causes(explain(busy))
    assert "The fastest measured draft is" in explain(busy)
    assert "busy" not in explain(run)


def test_a_better_length_is_recommended_to_be_measured() -> None:
    text = explain(run_of(cell([1], GOOD)))
    assert "Recommended: measure --max-draft-len 2, estimated at" in text
    assert explain(run_of(cheap_long := cell([4], HALF, cheap))).count("Recommended: --max-draft-len 4") == 1
    assert cheap_long.speculative[0].max_draft_len == 4


# --- the controller


def test_what_the_controller_chose_and_why() -> None:
    made = with_controller(cell([2, 4], HALF), 0.99, {0: 100, 2: 300, 4: 595, 3: 5}, gain=80, recall=20, end=3)
    text = explain(run_of(made))
    assert "The controller, which chooses the length of every step, reaches " in text
    assert ": 0.99 of the speed of the best fixed length, 4." in text
    for words in (
        "It chose drafts of 4 in 60% of the steps, which took 1.40 plain steps (expected: 1.80) and emitted 3.00 "
        "tokens per row (2.14x)",
        "(2.14x); drafts of 2 in 30% of the steps, which took 1.20 plain steps (expected: 1.40) and emitted 2.00",
        "(1.67x); no draft in 10% of the steps.",
    ):
        assert words in text
    assert "10% of the forwards of a request had no draft: no gain was expected (8%), the time of a plain " in text
    assert "step was measured again (2%)." in text
    assert "one token was left" not in text  # less than a fiftieth
    assert "Recommended: the controller (--adaptive, the default) with --max-draft-len 4, measured at" in text


def test_expected_and_real_acceptance_stand_side_by_side() -> None:
    made = with_controller(cell([4], HALF), 1.0, {4: 10})
    seen = [Expectation("x", 0.2, 0.3, 100, 0.25, 0.30), Expectation("x", 0.8, 0.9, 300, 0.85, 0.80)]
    made = changed(made, 2, acceptance=replace(made.variants[2].acceptance, reliability=seen))
    assert "Of 400 guesses 70% were expected to be accepted, and 68% were." in explain(run_of(made))


def test_a_controller_that_loses_is_not_recommended() -> None:
    text = explain(run_of(with_controller(cell([2, 4], HALF), 0.8, {4: 10})))
    assert ": 0.80 of the speed of the best fixed length, 4." in text
    assert "Recommended: --max-draft-len 4 --no-adaptive, measured at" in text


def test_the_best_tree_stands_beside_the_best_chain() -> None:
    made = cell([2, 4], HALF)
    best = made.fixed[-1]
    tree = replace(best, tree_top_k=2, tokens_per_second=0.9 * best.tokens_per_second, speed_up=Estimate(1.5))
    text = explain(run_of(with_controller(replace(made, variants=[*made.variants, tree]), 1.0, {4: 10})))
    assert "The best tree, draft length 4 with 2 branches, reaches 1.50x: 0.90 of the speed of that chain." in text
    assert "The fastest measured chain is draft_target with draft length 4:" in text
    quick = replace(tree, speed_up=Estimate(9.0))
    text = explain(run_of(replace(made, variants=[*made.variants, quick])))
    assert "Recommended: --max-draft-len 4 --tree-top-k 2, measured at 9.00x." in text


def test_a_controller_that_drafts_nothing_where_drafts_lose() -> None:
    lossy = cell([4], [0.02] * 16, linear)
    made = with_controller(lossy, 1 / lossy.fixed[0].speed_up.value, {0: 1000}, gain=1000)
    text = explain(run_of(made))
    assert "It chose no draft in 100% of the steps." in text
    assert "100% of the forwards of a request had no draft: no gain was expected (100%)." in text
    assert "Recommended: no drafts here" in text


# --- servers


def load(level: float, speed_up: float | None, side: str = "server") -> Load:
    spread, gain = Spread(0.1, 0.1, 0.2, 0.3), Estimate(speed_up) if speed_up else None
    return Load("made-up", side, "closed", level, 0.0, 4, {}, [1.0], 10, 10.0, spread, spread, None, None, "measured",
                gain, None)  # fmt: skip


def test_the_load_from_which_a_baseline_is_faster() -> None:
    loads = [load(16, 0.8), load(1, 1.9), load(4, 1.2), load(1, None, "baseline")]
    text = explain(run_of(kind="server", loads=loads))
    assert "concurrency 1: 1.90x" in text
    assert "From concurrency 16 on the baseline is faster" in text
    with pytest.raises(ConfigError, match="--baseline-url"):
        explain(run_of(kind="server", loads=[load(1, None)]))
