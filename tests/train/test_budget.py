"""Budget of `sametoken draft`: plans by given rates, as a pure function."""

from __future__ import annotations

import re

import pytest

from sametoken.errors import ConfigError
from sametoken.options.training import ROW
from sametoken.train.budget import (
    LEAST_STEPS,
    Limits,
    Rates,
    draft_vocabulary,
    epochs_left,
    parse_time,
    plan,
    spell_time,
)

RATES = Rates(
    load_s=3.0, conversation_s=1.0, conversation_tokens=250.0, answer_tokens=200.0, hidden=2000.0, training=500.0
)
LIMITS = Limits(budget_s=7200.0, spent_s=60.0, available=None, free=10**12, token_bytes=4608)
COUNTS = {"answers": 2, "quantize": 2, "bench": 3, "evaluate": 2}


@pytest.mark.parametrize("budget", [900.0, 1800.0, 7200.0, 86400.0])
def test_the_stages_together_take_the_budget_and_not_more(budget):
    made = plan(RATES, LIMITS._replace(budget_s=budget))
    whole = LIMITS.spent_s + sum(COUNTS.get(name, 1) * each for name, each in made.seconds.items())
    assert 0.93 * budget <= whole <= budget
    assert made.epochs == 3.0
    assert made.hidden_states


def test_a_budget_without_use_is_refused_with_the_least_that_has_one():
    with pytest.raises(ConfigError, match=r"--budget 2 min is too little .* expected at least (\d+) min") as refused:
        plan(RATES, LIMITS._replace(budget_s=120.0))
    least = float(re.findall(r"at least (\d+) min", str(refused.value))[0]) * 60
    with pytest.raises(ConfigError, match="too little"):
        plan(RATES, LIMITS._replace(budget_s=least - 80))
    made = plan(RATES, LIMITS._replace(budget_s=least))
    assert made.epochs * made.conversations * RATES.conversation_tokens >= LEAST_STEPS * ROW
    assert 3.0 < made.epochs <= 8.0  # few answers, read more often


def test_few_data_are_read_more_often_but_not_without_end():
    made = plan(RATES, LIMITS._replace(available=1000))
    assert made.conversations == 1000
    assert 3.0 < made.epochs < 20.0
    assert plan(RATES, LIMITS._replace(available=100)).epochs == 20.0


def test_hidden_states_are_stored_where_they_take_at_most_half_of_the_disk():
    stored = plan(RATES, LIMITS)
    size = int(stored.conversations * RATES.conversation_tokens * LIMITS.token_bytes)
    assert plan(RATES, LIMITS._replace(free=2 * size + 10**7)).hidden_states
    online = plan(RATES, LIMITS._replace(free=size))
    assert not online.hidden_states
    assert online.conversations < stored.conversations  # the target runs in every epoch


def test_training_gets_the_time_that_is_left():
    made = plan(RATES, LIMITS)
    tokens = round(made.conversations * RATES.conversation_tokens)
    took = made.seconds["held-out"] + 2 * made.seconds["answers"] + made.seconds["prepare"]
    left = LIMITS.budget_s - LIMITS.spent_s - took
    as_planned = epochs_left(made, RATES, tokens, left, took)
    assert as_planned == pytest.approx(made.epochs, rel=0.2)
    assert epochs_left(made, RATES, tokens, left / 2, took) < 0.6 * as_planned
    assert epochs_left(made, RATES, tokens, left, 2 * took) == epochs_left(made, RATES, tokens, left / 2, took)
    assert epochs_left(made, RATES, tokens, 0.0, took) * tokens == pytest.approx(LEAST_STEPS * ROW)
    assert epochs_left(made, RATES, 1000, left, took) == 20.0


def test_times_are_read_and_written():
    times = {"2h": 7200, "90m": 5400, "1h30m": 5400, "45s": 45, "1.5h": 5400, "10min": 600, "1d": 86400}
    assert {text: parse_time(text) for text in times} == times
    for wrong in ("", "2", "0h", "h", "2 weeks", "-1h", "1h 30"):
        with pytest.raises(ConfigError, match="expected a time such as 2h"):
            parse_time(wrong)
    assert [spell_time(each) for each in (45, 600, 7500)] == ["45 s", "10 min", "2 h 5 min"]


def test_the_draft_vocabulary_follows_the_targets():
    sizes = {4096: None, 8192: None, 32000: 4096, 49152: 8192, 151936: 16384, 262144: 32768}
    assert {size: draft_vocabulary(size) for size in sizes} == sizes
