"""One prompt plain and with drafts, each alone on the machine, recorded so that all can be shown side by side.

Two streams that ran at the same time would slow each other, and their times would mean nothing.
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
from sametoken.options.sampling import RequestSpeculation, SamplingParams


class Recording(NamedTuple):
    """A recorded completion.

    Attributes:
        frames: seconds since the start and tokens emitted until then, one per step.
    """

    completion: Completion
    frames: list[tuple[float, int]]

    def tokens_at(self, seconds: float) -> int:
        """Tokens that had been emitted after this time."""
        return max([0, *(tokens for at, tokens in self.frames if at <= seconds)])


class Race(NamedTuple):
    """The take of median duration of plain decoding and of every engine's drafts."""

    plain: Recording
    drafted: tuple[Recording, ...]

    @property
    def takes(self) -> tuple[Recording, ...]:
        return self.plain, *self.drafted

    @property
    def seconds(self) -> float:
        """Until the slowest has ended."""
        return max(take.frames[-1][0] for take in self.takes)


class Score(NamedTuple):
    """Result of one engine's drafts in one race, or in all of them together; speeds are in tokens per second."""

    method: str
    tokens: int
    plain_speed: float
    speed: float
    speed_up: float
    acceptance_length: float


def record(llm: LLM, prompt: Sequence[int], params: SamplingParams) -> Recording:
    """Stream one completion and note when its tokens came."""
    begin, frames, count, completion = time.perf_counter(), [], 0, None
    for chunk in llm.stream(prompt, params):
        count += len(chunk.token_ids)
        frames.append((time.perf_counter() - begin, count))
        completion = chunk.completion
    assert completion is not None
    return Recording(completion, frames)


def race(llms: Sequence[LLM], prompt: Sequence[int], params: SamplingParams, repeat: int) -> Race:
    """Run plain decoding and every engine's drafts in turn, `repeat` times.

    Args:
        llms: engines of one target that draft differently; the first decodes plainly too.

    Raises:
        LosslessnessError: two outputs differ.
    """
    plain_params = replace(params, speculative=RequestSpeculation(enabled=False))
    sides = [(llms[0], plain_params), *((llm, params) for llm in llms)]
    takes: list[list[Recording]] = [[] for _ in sides]
    for _ in range(repeat):
        for (llm, chosen), kept in zip(sides, takes, strict=True):
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
    """Text that each token of a completion adds; a mark, such as the end of a turn, is shown as a new line."""
    detokenizer = Detokenizer(llm.tokenizer, completion.prompt_token_ids, params)
    found: list[str] = []
    for token in completion.token_ids:
        detokenizer.push(token)
        marked = token in llm.tokenizer.special_ids and found and not found[-1].endswith("\n")
        found.append(detokenizer.delta() + "\n" * bool(marked))
    detokenizer.finish()
    found[-1] += detokenizer.delta()
    return found
