"""Parts that all replies with text share: usage, log-probabilities, and what speculation did. No engine.

TypedDicts: mypy checks what is sent against what is documented, without a cost for each chunk.
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

LEAST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI's word for "never"


class Spells(Protocol):
    """Methods of a tokenizer that wording needs."""

    def token_bytes(self, token: int) -> bytes: ...


class PromptDetails(TypedDict):
    cached_tokens: int


class CompletionDetails(TypedDict):
    """Tokens that say what the model thought; tokens of a prediction that became output, and those that were tried and
    did not, which are no part of the output."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(TypedDict):
    """Tokens of all prompts, each counted once, and of all that was generated, chosen or not."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[PromptDetails]
    completion_tokens_details: NotRequired[CompletionDetails]


class TokenReport(TypedDict):
    """The tokens that a choice or a chunk of it consists of, where each came from ("drafted" or "target"), and the
    guesses for its place that the target did not draw there."""

    token_ids: list[int]
    tokens: list[str]
    origins: list[str]
    rejected: list[list[str]]


class StepEntry(TypedDict):
    """The guesses of one forward: who made them (of several drafters one that said the accepted path), and for each
    guess its token, which guess it follows (-1: the last token before the forward), the target's probability of it
    there, whether it became output, and who said it."""

    drafter: str | None
    token_ids: list[int]
    tokens: list[str]
    parents: list[int]
    probabilities: list[float]
    accepted: list[bool]
    drafters: list[list[str]]


class SpeculationReport(TokenReport):
    """A whole choice, or a chunk of it: `steps` if they were asked for; at the end `stats`, the object that `sametoken
    generate --json` documents."""

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
    """The older form of /v1/completions: four lists of the same length."""

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
    """Of all completions of a request."""
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
    """Tokens and their origins, with the statistics of a completion that is done."""
    said: SpeculationReport = {
        "token_ids": list(emitted.token_ids),
        "tokens": [spelled(tokenizer, token) for token in emitted.token_ids],
        "origins": ["drafted" if drafted else "target" for drafted in emitted.origins],
        "rejected": [[spelled(tokenizer, token) for token in guesses] for guesses in emitted.rejected],
    }
    if emitted.steps is not None:
        said["steps"] = [_step(tokenizer, step) for step in emitted.steps]
    if completion is not None:
        said["stats"] = completion.speculation.to_json()
    return said


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
    """A tokenizer whose tokens are told by number, as vLLM's `return_tokens_as_token_ids` asks."""

    tokenizer: Spells

    def token_bytes(self, token: int) -> bytes:
        return self.tokenizer.token_bytes(token)


def spelled(tokenizer: Spells, token: int) -> str:
    """A token as text; a part of a character as "bytes:\\xe2\\x82", so that different tokens differ."""
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
    """Log-probabilities of consecutive tokens; the first of a prompt has none.

    Args:
        tokens, items: of the same length.
        top: alternatives to show, of which an item may have more.
        offset: character at which their text begins.
    """
    said: TextLogprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token, item in zip(tokens, items, strict=True):
        text = spelled(tokenizer, token)
        said["tokens"].append(text)
        said["text_offset"].append(offset)
        said["token_logprobs"].append(None if item is None else _finite(item.logprob))
        said["top_logprobs"].append(None if item is None else _alternatives(tokenizer, item, text, top))
        offset += len(text)
    return said


def _alternatives(tokenizer: Spells, item: TokenLogprob, text: str, top: int) -> dict[str, float]:
    """By text: the token itself first, as vLLM has it, then the best ones."""
    best = {spelled(tokenizer, token): _finite(logprob) for token, logprob in _best(item, top)}
    return {text: _finite(item.logprob), **best}


def _best(item: TokenLogprob, top: int) -> Sequence[tuple[int, float]]:
    """The alternatives to show, of which an item may have more."""
    return item.top if top == WHOLE else item.top[:top]


def prompt_logprobs(
    tokenizer: Spells, items: Sequence[TokenLogprob | None], top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's form: for each prompt token, by token id, its log-probability, rank and text; its own first."""
    said: list[dict[str, dict[str, Any]] | None] = []
    for item in items:
        if item is None:
            said.append(None)
            continue
        ranked = [(token, logprob, rank) for rank, (token, logprob) in enumerate(_best(item, top), start=1)]
        said.append(
            {
                str(token): {"logprob": _finite(logprob), "rank": rank, "decoded_token": spelled(tokenizer, token)}
                for token, logprob, rank in [(item.token_id, item.logprob, item.rank), *ranked]
            }
        )
    return said


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
