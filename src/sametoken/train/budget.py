"""Division of a budget of time among the stages from a target to a head that serves it, by measured rates.

Pure functions of numbers; docs/training.md states the rules. Seconds and tokens; a row is `ROW` tokens of training.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from sametoken.errors import ConfigError
from sametoken.train.defaults import MOST_EPOCHS
from sametoken.train.settings import ROW

EPOCHS = 3.0  # passes over the data, where time for both answers and training is left
LEAST_STEPS = 100  # with fewer, a head is not worth its time
FEW_DATA_EPOCHS = 8.0  # at most, to reach the least number of steps from few answers
SLACK = 0.05  # share of the budget that is not divided
CHECKED = 0.1  # share of the budget for the evaluations during training, and for the measurements after it
SHORT_S = 1800  # below this budget, there are fewer evaluations and shorter measurements
EVALUATED_TOKENS = 64  # of an answer, in evaluations
BATCHED = 4  # tokens/s of a full batch, relative to one stream
HEADS = 3  # that are measured: as trained, and rounded to two formats
VARIANTS = 5  # of a measurement: plain, three chains, the controller
LEAST_VOCABULARY, MOST_VOCABULARY = 4096, 32768
UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


class Rates(NamedTuple):
    """Measured speed of the stages.

    Attributes:
        load_s: seconds until a model is ready.
        conversation_s: seconds of an answered conversation, in full batches.
        conversation_tokens: tokens of its sample.
        answer_tokens: tokens of its answer.
        hidden: tokens per second whose hidden states are written.
        training: tokens per second that are trained on, with stored hidden states.
    """

    load_s: float
    conversation_s: float
    conversation_tokens: float
    answer_tokens: float
    hidden: float
    training: float


class Limits(NamedTuple):
    """Limits of a plan.

    Attributes:
        budget_s: seconds for everything.
        spent_s: seconds that are gone.
        available: number of conversations that can be answered, None without a limit.
        free: bytes that are free on the disk.
        token_bytes: bytes of the hidden states of a token.
    """

    budget_s: float
    spent_s: float
    available: int | None
    free: int
    token_bytes: int


class DraftPlan(NamedTuple):
    """Amount of work of each stage.

    Attributes:
        held_out: number of prompts that are kept apart; training evaluates the head on them.
        conversations: number of conversations to train on.
        epochs: passes over them.
        hidden_states: true if hidden states are stored on disk.
        evaluations: number of evaluations during training.
        bench_prompts, bench_tokens, bench_rounds: extent of each measurement of speed.
        seconds: estimates by stage: held-out, answers, prepare, train, quantize, bench, evaluate.
    """

    held_out: int
    conversations: int
    epochs: float
    hidden_states: bool
    evaluations: int
    bench_prompts: int
    bench_tokens: int
    bench_rounds: int
    seconds: dict[str, float]


def parse_time(text: str) -> float:
    """Parse a time such as "2h", "90m", "1h30m" or "45s"; a number alone is refused.

    Raises:
        ConfigError: the text is no time, or zero.
    """
    spelled = text.strip().lower()
    parts = re.findall(r"(\d{1,9}(?:\.\d{1,9})?)(min|[smhd])", spelled)
    seconds = sum(float(number) * UNITS[unit] for number, unit in parts)
    if not seconds or "".join(number + unit for number, unit in parts) != spelled:
        raise ConfigError(f"--budget {text!r}: expected a time such as 2h, 90m or 1h30m")
    return seconds


def spell_time(seconds: float) -> str:
    """Text of a time: "45 s", "12 min" or "2 h 5 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = math.ceil(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def draft_vocabulary(vocab_size: int) -> int | None:
    """Number of tokens that a head may propose: the power of two nearest to an eighth; None for all of a small
    vocabulary.
    """
    if vocab_size <= 2 * LEAST_VOCABULARY:
        return None
    return int(min(MOST_VOCABULARY, max(LEAST_VOCABULARY, 2 ** round(math.log2(vocab_size / 8)))))


def plan(rates: Rates, limits: Limits) -> DraftPlan:
    """Divide the budget.

    Raises:
        ConfigError: the budget is too small for a useful head; the message has the least that is not.
    """
    made, least_s = _divided(rates, limits), limits.budget_s
    if made is not None:
        return made
    while _divided(rates, limits._replace(budget_s=least_s)) is None:
        least_s *= 1.02
    raise ConfigError(
        f"--budget {spell_time(limits.budget_s)} is too little for a useful head of this target on this machine; "
        f"expected at least {spell_time(least_s)}"
    )


def _divided(rates: Rates, limits: Limits) -> DraftPlan | None:
    """Divide the budget; None if it is too small."""
    short = limits.budget_s < SHORT_S
    checked, speed = CHECKED * limits.budget_s, rates.answer_tokens / rates.conversation_s
    evaluations, rounds, tokens = (4, 2, 32) if short else (8, 3, 64)
    prompts = _between(8, (checked / evaluations - rates.load_s) * speed / EVALUATED_TOKENS, 80)
    per_prompt = VARIANTS * rounds * tokens * BATCHED / speed
    benched = _between(2, checked / HEADS / per_prompt, 12)
    evaluation = rates.load_s + prompts * EVALUATED_TOKENS / speed
    seconds = {
        "held-out": rates.load_s + prompts * rates.conversation_s,
        "train": rates.load_s + evaluations * evaluation,
        "quantize": 4 * rates.load_s + 2 * evaluation,
        "bench": rates.load_s + benched * per_prompt,
        "evaluate": evaluation,
        "answers": rates.load_s,
        "prepare": rates.load_s,
    }
    counts = {"answers": 2, "quantize": HEADS - 1, "bench": HEADS, "evaluate": 2}
    fixed = limits.spent_s + sum(counts.get(name, 1) * each for name, each in seconds.items())
    found = _amount(rates, limits, limits.budget_s * (1 - SLACK) - fixed)
    if found is None:
        return None
    conversations, epochs = found
    sample_tokens = conversations * rates.conversation_tokens
    hidden = epochs > 1 and sample_tokens * limits.token_bytes <= limits.free / 2
    seconds["answers"] += conversations / 2 * rates.conversation_s
    seconds["prepare"] += sample_tokens / rates.hidden if hidden else 0.0
    seconds["train"] += epochs * sample_tokens * (1 / rates.training + (0 if hidden else 1 / rates.hidden))
    return DraftPlan(prompts, conversations, epochs, hidden, evaluations, benched, tokens, rounds, seconds)


def _between(least: int, wanted: float, most: int) -> int:
    return int(max(least, min(most, wanted)))


def _amount(rates: Rates, limits: Limits, left_s: float) -> tuple[int, float] | None:
    """Conversations and epochs for the time that is left; None if it is too little."""
    size, least = rates.conversation_tokens, LEAST_STEPS * ROW
    once = rates.conversation_s + size / rates.hidden  # to answer a conversation and to read it once
    again = size / rates.training
    if size * limits.token_bytes * left_s / (once + EPOCHS * again) > limits.free / 2:  # the target runs in every epoch
        once, again = rates.conversation_s, again + size / rates.hidden
    most = math.inf if limits.available is None else limits.available
    conversations = min(left_s / (once + EPOCHS * again), most)
    if conversations * size * EPOCHS >= least and conversations < most:
        return int(conversations), EPOCHS
    training_s = least * again / size
    needed = min(least / FEW_DATA_EPOCHS / size, most)
    if left_s < training_s + needed * once:
        return None
    if conversations < most:
        conversations = min(most, (left_s - training_s) / once)
    epochs = max(least / (conversations * size), (left_s - conversations * once) / (conversations * again))
    return math.ceil(conversations), min(epochs, float(MOST_EPOCHS))


def epochs_left(made: DraftPlan, rates: Rates, tokens: int, left_s: float, took_s: float) -> float:
    """Epochs for the training that begins now: as many as the time allows, with at least `LEAST_STEPS` steps.

    Args:
        tokens: tokens of the samples.
        left_s: seconds that are left of the budget.
        took_s: seconds of the stages so far; if they took longer than planned, so will the others.
    """
    seconds = made.seconds
    left_s /= max(1.0, took_s / (seconds["held-out"] + 2 * seconds["answers"] + seconds["prepare"]))
    after = (HEADS - 1) * seconds["quantize"] + HEADS * seconds["bench"] + 2 * seconds["evaluate"]
    fixed = rates.load_s + made.evaluations * seconds["evaluate"]
    each = tokens * (1 / rates.training + (0 if made.hidden_states else 1 / rates.hidden))
    return min(float(MOST_EPOCHS), max(LEAST_STEPS * ROW / tokens, (left_s - after - fixed) / each))
