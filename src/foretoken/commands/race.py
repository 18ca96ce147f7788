"""One prompt plain and speculative, each alone on the machine, recorded so that both can be shown side by side.

Two streams that ran at once would slow each other and the numbers would mean nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from foretoken.engine.completion import Completion
from foretoken.engine.detokenize import Detokenizer
from foretoken.engine.llm import LLM
from foretoken.errors import LosslessnessError
from foretoken.speculation.params import RequestSpeculation, SamplingParams


class Take(NamedTuple):
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
    """The take of median duration of each side."""

    plain: Take
    speculative: Take

    @property
    def seconds(self) -> float:
        """Until the slower side has ended."""
        return max(self.plain.frames[-1][0], self.speculative.frames[-1][0])


class Score(NamedTuple):
    """What one race, or all of them together, showed; speeds are in tokens per second."""

    tokens: int
    plain_speed: float
    speculative_speed: float
    speed_up: float
    acceptance_length: float


def record(llm: LLM, prompt: Sequence[int], params: SamplingParams) -> Take:
    """Streams one completion and notes when its tokens came."""
    begin, frames, count, completion = time.perf_counter(), [], 0, None
    for chunk in llm.stream(prompt, params):
        count += len(chunk.token_ids)
        frames.append((time.perf_counter() - begin, count))
        completion = chunk.completion
    assert completion is not None
    return Take(completion, frames)


def race(llm: LLM, prompt: Sequence[int], params: SamplingParams, repeat: int) -> Race:
    """Runs both sides in turn, `repeat` times.

    Raises:
        LosslessnessError: two outputs differ.
    """
    plain_params = replace(params, speculative=RequestSpeculation(enabled=False))
    plain, speculative = [], []
    for _ in range(repeat):
        plain.append(record(llm, prompt, plain_params))
        speculative.append(record(llm, prompt, params))
    for take in (*plain, *speculative):
        _check_equal(plain[0].completion, take.completion)
    return Race(_median(plain), _median(speculative))


def _check_equal(plain: Completion, other: Completion) -> None:
    if plain.token_ids == other.token_ids:
        return
    pairs = enumerate(zip(plain.token_ids, other.token_ids, strict=False))
    shorter = min(len(plain.token_ids), len(other.token_ids))
    first = next((i for i, (a, b) in pairs if a != b), shorter)
    raise LosslessnessError(
        f"output token {first} differs: plain goes on with {plain.token_ids[first : first + 4]}, "
        f"{other.speculation.method} with {other.token_ids[first : first + 4]}; this is a bug, please report it "
        "with the output of `foretoken verify`"
    )


def _median(takes: Sequence[Take]) -> Take:
    return sorted(takes, key=lambda take: take.completion.seconds)[(len(takes) - 1) // 2]


def score(races: Iterable[Race]) -> Score:
    """Speeds, speed-up and acceptance length over all tokens of the races."""
    plain, fast = zip(*((r.plain.completion, r.speculative.completion) for r in races), strict=True)
    tokens = sum(len(c.token_ids) for c in plain)
    plain_s, fast_s = (sum(c.seconds for c in side) for side in (plain, fast))
    forwards = sum(c.speculation.target_forwards for c in fast)
    return Score(tokens, tokens / plain_s, tokens / fast_s, plain_s / fast_s, tokens / forwards)


def pieces(llm: LLM, completion: Completion, params: SamplingParams) -> list[str]:
    """What each token of a completion added to its text; a mark, such as the end of a turn, is shown as a new line."""
    detokenizer = Detokenizer(llm.tokenizer, completion.prompt_token_ids, params)
    found: list[str] = []
    for token in completion.token_ids:
        detokenizer.push(token)
        marked = token in llm.tokenizer.special_ids and found and not found[-1].endswith("\n")
        found.append(detokenizer.delta() + "\n" * bool(marked))
    detokenizer.finish()
    found[-1] += detokenizer.delta()
    return found
