"""Recorded runs of one prompt, plain and with drafts, for a display side by side.

The runs follow each other, since concurrent runs would slow each other.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from sametoken.engine.completion import Completion
from sametoken.engine.detokenize import Detokenizer
from sametoken.engine.llm import LLM
from sametoken.errors import LosslessnessError
from sametoken.heads.registry import model_free_drafters
from sametoken.options.sampling import RequestSpeculation, SamplingParams


class Recording(NamedTuple):
    """A recorded completion.

    Attributes:
        completion: completion.
        frames: seconds since the start, and number of tokens emitted so far, after each step.
    """

    completion: Completion
    frames: list[tuple[float, int]]

    def tokens_at(self, seconds: float) -> int:
        """Number of tokens emitted in the first `seconds`."""
        return max([0, *(tokens for at, tokens in self.frames if at <= seconds)])


class Race(NamedTuple):
    """Recordings of median duration: one of plain decoding, and one of each engine's drafts."""

    plain: Recording
    drafted: tuple[Recording, ...]

    @property
    def takes(self) -> tuple[Recording, ...]:
        return self.plain, *self.drafted

    @property
    def seconds(self) -> float:
        """Seconds until the end of the slowest recording."""
        return max(take.frames[-1][0] for take in self.takes)


class Score(NamedTuple):
    """Result of one engine's drafts over one or more races; speeds are in tokens per second."""

    method: str
    tokens: int
    plain_speed: float
    speed: float
    speed_up: float
    acceptance_length: float


def record(llm: LLM, prompt: Sequence[int], params: SamplingParams) -> Recording:
    """Stream one completion, and record the times of its tokens."""
    begin, frames, count, completion = time.perf_counter(), [], 0, None
    for chunk in llm.stream(prompt, params):
        count += len(chunk.token_ids)
        frames.append((time.perf_counter() - begin, count))
        completion = chunk.completion
    assert completion is not None
    return Recording(completion, frames)


def forget_outputs(llm: LLM) -> None:
    """Replace the drafters without a model: their memory of outputs would predict a repeated prompt exactly."""
    llm.engine.drafters.update(model_free_drafters(llm.speculative))


def race(llms: Sequence[LLM], prompt: Sequence[int], params: SamplingParams, repeat: int) -> Race:
    """Run plain decoding and every engine's drafts in turn, `repeat` times.

    Args:
        llms: engines of one target with different drafts; the first one also runs plain decoding.
        prompt: token ids.
        params: parameters of the runs with drafts.
        repeat: number of rounds.

    Raises:
        LosslessnessError: two outputs differ.
    """
    plain_params = replace(params, speculative=RequestSpeculation(enabled=False))
    sides = [(llms[0], plain_params), *((llm, params) for llm in llms)]
    takes: list[list[Recording]] = [[] for _ in sides]
    for _ in range(repeat):
        for (llm, chosen), kept in zip(sides, takes, strict=True):
            forget_outputs(llm)
            kept.append(record(llm, prompt, chosen))
    for kept in takes:
        for take in kept:
            _check_equal(takes[0][0].completion, take.completion)
    plain, *drafted = map(_median, takes)
    return Race(plain, tuple(drafted))


def _check_equal(plain: Completion, other: Completion) -> None:
    if plain.token_ids == other.token_ids:
        return
    pairs = enumerate(zip(plain.token_ids, other.token_ids, strict=False))
    shorter = min(len(plain.token_ids), len(other.token_ids))
    first = next((i for i, (a, b) in pairs if a != b), shorter)
    raise LosslessnessError(
        f"output token {first} differs: plain goes on with {plain.token_ids[first : first + 4]}, "
        f"{other.speculation.method} with {other.token_ids[first : first + 4]}; this is a bug, please report it "
        "with the output of `sametoken verify`"
    )


def _median(takes: Sequence[Recording]) -> Recording:
    return sorted(takes, key=lambda take: take.completion.seconds)[(len(takes) - 1) // 2]


def score(races: Iterable[Race]) -> list[Score]:
    """Speeds, speed-up and acceptance length over all tokens of the races, for every engine's drafts."""
    sides = list(zip(*(race.takes for race in races), strict=True))
    tokens = sum(len(take.completion.token_ids) for take in sides[0])
    plain_s, *seconds = (sum(take.completion.seconds for take in side) for side in sides)
    return [
        Score(
            side[0].completion.speculation.method, tokens, tokens / plain_s, tokens / spent, plain_s / spent,
            tokens / sum(take.completion.speculation.target_forwards for take in side),
        )
        for side, spent in zip(sides[1:], seconds, strict=True)
    ]  # fmt: skip


def pieces(llm: LLM, completion: Completion, params: SamplingParams) -> list[str]:
    """Text added by each token of a completion; a special token, such as the end of a turn, adds a line break."""
    detokenizer = Detokenizer(llm.tokenizer, completion.prompt_token_ids, params)
    found: list[str] = []
    for token in completion.token_ids:
        detokenizer.push(token)
        marked = token in llm.tokenizer.special_ids and found and not found[-1].endswith("\n")
        found.append(detokenizer.delta() + "\n" * bool(marked))
    detokenizer.finish()
    found[-1] += detokenizer.delta()
    return found
