"""Results for users: completions, and chunks of streamed completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sametoken.engine.request import Emission, FinishReason, Request, TokenLogprob
from sametoken.engine.stats import SpeculationStats
from sametoken.engine.step_tree import StepTree
from sametoken.errors import SametokenError

SHOWN_TEXT = 80  # characters of a completion's text in its repr


@dataclass(frozen=True, slots=True, repr=False)
class Completion:
    """One finished completion.

    Attributes:
        index: number of the prompt in the call.
        choice: number of the completion among the n of its prompt.
        prompt: text of the prompt; None if it was given as token ids.
        prompt_token_ids: tokens of the prompt.
        text: generated text.
        token_ids: generated tokens, the one that ended the request included.
        finish_reason: "stop", "length", "abort" (cancelled) or "error".
        stop_reason: stop string or stop id that ended the request, or message of `error`; None for an end token.
        error: error that ended this completion alone; None without one.
        origins: for every token, True if it was drafted, False if it is the target's own draw.
        rejected: for every token, the guesses at its position that the target did not draw.
        logprobs: log-probabilities of the tokens, if requested.
        prompt_logprobs: log-probabilities of the prompt's tokens, if requested; None for the first one.
        cached_tokens: number of prompt tokens whose keys and values were reused.
        seconds: time from arrival to the last token.
        ttft: time from arrival to the first token, in seconds.
        speculation: statistics of speculation.
        kept_tokens: number of further prompt tokens whose keys and values are now kept for reuse.
        steps: tree of guesses of every forward; None unless `RequestSpeculation.steps` is set.
    """

    index: int
    choice: int
    prompt: str | None
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None
    error: SametokenError | None
    origins: list[bool]
    rejected: list[tuple[int, ...]]
    logprobs: list[TokenLogprob] | None
    prompt_logprobs: list[TokenLogprob | None] | None
    cached_tokens: int
    seconds: float
    ttft: float
    speculation: SpeculationStats
    kept_tokens: int = 0
    steps: Sequence[StepTree] | None = None

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= SHOWN_TEXT else f"{self.text[:SHOWN_TEXT]}..."
        return (
            f"Completion({text!r}, {len(self.token_ids)} tokens in {self.seconds:.2f} s, "
            f"finish_reason={self.finish_reason!r}, method={self.speculation.method!r}, "
            f"acceptance_length={self.speculation.acceptance_length:.2f})"
        )

    @property
    def outputs(self) -> list[Completion]:
        """List of this completion, where scripts for vLLM look for the text: `output.outputs[0].text`."""
        return [self]

    @property
    def tokens_per_second(self) -> float:
        return len(self.token_ids) / self.seconds if self.seconds else 0.0

    @classmethod
    def of(cls, request: Request) -> Completion:
        """Completion of a request that has ended."""
        assert request.finish_reason is not None
        assert request.finished is not None
        first = request.first_token or request.finished
        return cls(
            index=request.index,
            choice=request.choice,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_ids,
            text=request.detokenizer.text,
            token_ids=request.output_ids,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            error=request.error,
            origins=request.origins,
            rejected=request.rejected,
            logprobs=request.logprobs if request.params.logprobs is not None else None,
            prompt_logprobs=request.prompt_logprobs if request.params.prompt_logprobs is not None else None,
            cached_tokens=request.cached_tokens,
            seconds=request.finished - request.arrived,
            ttft=first - request.arrived,
            speculation=request.stats,
            kept_tokens=request.kept_tokens,
            steps=request.steps if request.reports_steps else None,
        )

    def to_json(self) -> dict[str, Any]:
        """Documented JSON object of `sametoken generate --json`."""
        record: dict[str, Any] = {
            "index": self.index,
            "choice": self.choice,
            "prompt": self.prompt,
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "speculation": self.speculation.to_json(),
        }
        if self.error is not None:
            record["error"] = str(self.error)
        if self.steps is not None:
            record["steps"] = [step.to_json() for step in self.steps]
        if self.logprobs is not None:
            record["logprobs"] = [_logprob(item) for item in self.logprobs]
        if self.prompt_logprobs is not None:
            record["prompt_logprobs"] = [item and _logprob(item) for item in self.prompt_logprobs]
        return record


def _logprob(item: TokenLogprob) -> dict[str, Any]:
    top = [{"token_id": token, "logprob": value} for token, value in item.top]
    return {"token_id": item.token_id, "logprob": item.logprob, "rank": item.rank, "top_logprobs": top}


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens and text that one step added to a streamed completion.

    Attributes:
        index: number of the prompt in the call.
        choice: number of the completion among the n of its prompt.
        text: new final characters; may lag behind `token_ids`.
        token_ids: new tokens.
        origins: see `Completion`.
        rejected: see `Completion`.
        logprobs: see `Completion`.
        completion: whole completion, in the last chunk; else None.
        steps: see `Completion`.
    """

    index: int
    choice: int
    text: str
    token_ids: list[int]
    origins: list[bool]
    rejected: list[tuple[int, ...]]
    logprobs: list[TokenLogprob] | None
    completion: Completion | None
    steps: Sequence[StepTree] | None = None

    @classmethod
    def of(cls, emission: Emission) -> Chunk:
        """Chunk for an emission, with the text that is complete by now."""
        request = emission.request
        return cls(
            index=request.index,
            choice=request.choice,
            text=request.detokenizer.delta(),
            token_ids=emission.token_ids,
            origins=emission.origins,
            rejected=emission.rejected,
            logprobs=emission.logprobs if request.logprobs else None,
            completion=Completion.of(request) if emission.finished else None,
            steps=emission.steps if request.reports_steps else None,
        )
