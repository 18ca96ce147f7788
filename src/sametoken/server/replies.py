"""Parts that all replies with text share: usage, log-probabilities, and reports of speculation.

They are TypedDicts, so that mypy checks the replies against their documentation without a cost for each chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NotRequired, Protocol

from typing_extensions import TypedDict

from sametoken.engine.completion import Chunk, Completion
from sametoken.engine.request import TokenLogprob
from sametoken.engine.step_tree import StepTree
from sametoken.kinds import coming_with
from sametoken.server.fields import WHOLE

PREDICTION = coming_with("prediction")

LEAST_LOGPROB = -9999.0  # OpenAI's value for minus infinity, which JSON does not have


class Spells(Protocol):
    """Methods of a tokenizer that replies need."""

    def token_bytes(self, token: int) -> bytes: ...


class PromptDetails(TypedDict):
    cached_tokens: int


class CompletionDetails(TypedDict):
    """Numbers of reasoning tokens, and of tokens of a prediction: accepted ones, which are part of the output, and
    rejected ones, which are not."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(TypedDict):
    """Numbers of tokens: of all prompts, each counted once, and of all completions, including those not returned."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[PromptDetails]
    completion_tokens_details: NotRequired[CompletionDetails]


class TokenReport(TypedDict):
    """Tokens of a choice or chunk, the origin of each ("drafted" or "target"), and the rejected guesses at its
    position."""

    token_ids: list[int]
    tokens: list[str]
    origins: list[str]
    rejected: list[list[str]]


class StepEntry(TypedDict):
    """Guesses of one forward. `drafter` is their drafter; of several, one that proposed the accepted path. The lists
    have for each guess: its token, its parent among the guesses (-1: the last token before the forward), the target's
    probability, true if it was accepted, and the drafters that proposed it."""

    drafter: str | None
    token_ids: list[int]
    tokens: list[str]
    parents: list[int]
    probabilities: list[float]
    accepted: list[bool]
    drafters: list[list[str]]


class SpeculationReport(TokenReport):
    """Report of speculation for a choice or chunk, with `steps` if the request sets `speculative.steps`. The last
    chunk and a whole choice have `stats`, the object that `sametoken generate --json` documents."""

    steps: NotRequired[list[StepEntry]]
    stats: NotRequired[dict[str, Any]]


class TopLogprob(TypedDict):
    token: str
    bytes: list[int]
    logprob: float


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[ChatLogprob]


class TextLogprobs(TypedDict):
    """Log-probabilities in the older form of /v1/completions: four lists of equal length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


def usage(prompt_tokens: int, completion_tokens: int, cached: int | None = None) -> Usage:
    counted: Usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if cached is not None:
        counted["prompt_tokens_details"] = {"cached_tokens": cached}
    return counted


def total_usage(completions: Iterable[Completion], reasoning_tokens: int = 0) -> Usage:
    """Usage of all completions of a request."""
    done = list(completions)
    first = [completion for completion in done if completion.choice == 0]
    counted = usage(
        sum(len(completion.prompt_token_ids) for completion in first),
        sum(len(completion.token_ids) for completion in done),
        sum(completion.cached_tokens for completion in first),
    )
    predicted = [completion.speculation for completion in done if completion.speculation.method == PREDICTION]
    accepted = sum(stats.accepted for stats in predicted)
    counted["completion_tokens_details"] = {
        "reasoning_tokens": reasoning_tokens,
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": sum(stats.drafted for stats in predicted) - accepted,
    }
    return counted


def report(tokenizer: Spells, emitted: Chunk | Completion, completion: Completion | None) -> SpeculationReport:
    """Report of speculation for a chunk or completion; `completion` adds the statistics of a finished one."""
    result: SpeculationReport = {
        "token_ids": list(emitted.token_ids),
        "tokens": [spelled(tokenizer, token) for token in emitted.token_ids],
        "origins": ["drafted" if drafted else "target" for drafted in emitted.origins],
        "rejected": [[spelled(tokenizer, token) for token in guesses] for guesses in emitted.rejected],
    }
    if emitted.steps is not None:
        result["steps"] = [_step(tokenizer, step) for step in emitted.steps]
    if completion is not None:
        result["stats"] = completion.speculation.to_json()
    return result


def _step(tokenizer: Spells, step: StepTree) -> StepEntry:
    return {
        "drafter": step.drafter,
        "token_ids": list(step.token_ids),
        "tokens": [spelled(tokenizer, token) for token in step.token_ids],
        "parents": list(step.parents),
        "probabilities": list(step.probabilities),
        "accepted": list(step.accepted),
        "drafters": list(map(list, step.drafters)),
    }


class Numbered(NamedTuple):
    """Tokenizer whose tokens are reported by id, as with vLLM's `return_tokens_as_token_ids`."""

    tokenizer: Spells

    def token_bytes(self, token: int) -> bytes:
        return self.tokenizer.token_bytes(token)


def spelled(tokenizer: Spells, token: int) -> str:
    """Text of a token; a part of a character is "bytes:\\xe2\\x82", so that different tokens have different texts."""
    if isinstance(tokenizer, Numbered):
        return f"token_id:{token}"
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(tokenizer: Spells, items: Sequence[TokenLogprob]) -> ChatLogprobs:
    return {
        "content": [
            {
                **_top(tokenizer, item.token_id, item.logprob),
                "top_logprobs": [_top(tokenizer, token, logprob) for token, logprob in item.top],
            }
            for item in items
        ]
    }


def _top(tokenizer: Spells, token: int, logprob: float) -> TopLogprob:
    return {
        "token": spelled(tokenizer, token),
        "bytes": list(tokenizer.token_bytes(token)),
        "logprob": _finite(logprob),
    }


def text_logprobs(
    tokenizer: Spells, tokens: Sequence[int], items: Sequence[TokenLogprob | None], top: int, offset: int
) -> TextLogprobs:
    """Log-probabilities of consecutive tokens.

    Args:
        tokens: token ids.
        items: log-probability of each token; None for the first token of a prompt.
        top: number of alternatives to report; an item may have more.
        offset: character of the choice at which the text of the tokens begins.
    """
    result: TextLogprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token, item in zip(tokens, items, strict=True):
        text = spelled(tokenizer, token)
        result["tokens"].append(text)
        result["text_offset"].append(offset)
        result["token_logprobs"].append(None if item is None else _finite(item.logprob))
        result["top_logprobs"].append(None if item is None else _alternatives(tokenizer, item, text, top))
        offset += len(text)
    return result


def _alternatives(tokenizer: Spells, item: TokenLogprob, text: str, top: int) -> dict[str, float]:
    """Log-probabilities by text: of the token itself first, as in vLLM, then of the best alternatives."""
    best = {spelled(tokenizer, token): _finite(logprob) for token, logprob in _best(item, top)}
    return {text: _finite(item.logprob), **best}


def _best(item: TokenLogprob, top: int) -> Sequence[tuple[int, float]]:
    """The `top` best alternatives of an item, or all with `WHOLE`."""
    return item.top if top == WHOLE else item.top[:top]


def prompt_logprobs(
    tokenizer: Spells, items: Sequence[TokenLogprob | None], top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """Log-probabilities of prompt tokens in vLLM's form.

    Each token has an object with log-probability, rank and text by token id: of the token first, then of alternatives.
    The first token has None.
    """
    result: list[dict[str, dict[str, Any]] | None] = []
    for item in items:
        if item is None:
            result.append(None)
            continue
        ranked = [(token, logprob, rank) for rank, (token, logprob) in enumerate(_best(item, top), start=1)]
        result.append(
            {
                str(token): {"logprob": _finite(logprob), "rank": rank, "decoded_token": spelled(tokenizer, token)}
                for token, logprob, rank in [(item.token_id, item.logprob, item.rank), *ranked]
            }
        )
    return result


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
