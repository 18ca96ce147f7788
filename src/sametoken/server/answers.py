"""How an endpoint words what the engine emits: the protocol, what answers share, and the form of /v1/completions.

An answer is made for one request and asked for events of a stream, or for the whole reply at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sametoken.engine.completion import Chunk, Completion
from sametoken.engine.request import Request
from sametoken.server.replies import (
    Spells,
    Usage,
    prompt_logprobs,
    report,
    text_logprobs,
    total_usage,
    usage,
)
from sametoken.server.schema import CompletionRequest, Generation


class Answer(Protocol):
    """The words of one request."""

    def opening(self) -> Iterator[dict[str, Any]]:
        """Events before the first chunk."""
        ...

    def events(self, chunk: Chunk) -> Iterator[dict[str, Any]]:
        """The events of a chunk."""
        ...

    def closing(self, completions: Sequence[Completion]) -> Iterator[dict[str, Any]]:
        """Events after the last chunk."""
        ...

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The reply to a request that did not stream; completions in order of prompt and choice."""
        ...


@dataclass(frozen=True, slots=True)
class Head:
    """What every object of a reply begins with.

    Attributes:
        id: of the reply. `created`: Unix seconds. `model`: the served name.
    """

    id: str
    created: int
    model: str

    def of(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


@dataclass
class Written:
    """How far the choices of a stream have come.

    Attributes:
        tokens: generated so far, by place of the choice. `characters`: of the text they spell.
    """

    tokens: dict[int, int] = field(default_factory=dict)
    characters: dict[int, int] = field(default_factory=dict)


class CompletionAnswer:
    """/v1/completions."""

    def __init__(self, body: CompletionRequest, head: Head, requests: Sequence[Request], tokenizer: Spells) -> None:
        self._body, self._head, self._tokenizer, self._requests = body, head, tokenizer, requests
        self._drawn, self._written = body.drawn, Written()

    def opening(self) -> Iterator[dict[str, Any]]:
        return iter(())

    def events(self, chunk: Chunk) -> Iterator[dict[str, Any]]:
        place = chunk.index * self._drawn + chunk.choice
        request, body = self._requests[place], self._body
        first = place not in self._written.tokens
        choice = self._choice(request, chunk.token_ids, chunk.text, first)
        choice["index"] = place
        if body.logprobs is not None:
            offset = self._written.characters.get(place, 0)
            items = [*(request.prompt_logprobs if first and body.echo else ()), *self._kept(chunk.logprobs or [])]
            words = text_logprobs(self._tokenizer, choice.pop("scored"), items, body.logprobs, offset)
            choice["logprobs"] = words
            self._written.characters[place] = offset + sum(map(len, words["tokens"]))
        choice.pop("scored", None)
        if body.reports:
            choice["speculative"] = report(self._tokenizer, chunk, chunk.completion)
        end(choice, chunk.completion)
        event = {**self._head.of("text_completion"), "choices": [choice]}
        count(event, body, self._written, place, chunk, [len(r.prompt_ids) for r in self._requests[:: self._drawn]])
        yield event

    def closing(self, completions: Sequence[Completion]) -> Iterator[dict[str, Any]]:
        if self._body.counted.include_usage:
            yield {**self._head.of("text_completion"), "choices": [], "usage": self._usage(completions)}

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        chosen: list[Completion] = []
        for begin in range(0, len(completions), self._drawn):
            chosen += _best(completions[begin : begin + self._drawn], self._body.choices)
        choices = [self._whole_choice(place, completion) for place, completion in enumerate(chosen)]
        return {**self._head.of("text_completion"), "choices": choices, "usage": self._usage(completions)}

    def _usage(self, completions: Sequence[Completion]) -> Usage:
        counted = total_usage(completions)
        if self._body.max_tokens == 0:
            counted["completion_tokens"], counted["total_tokens"] = 0, counted["prompt_tokens"]
        return counted

    def _kept(self, items: Sequence[Any]) -> Sequence[Any]:
        """What is shown of the tokens: with max_tokens 0 one was drawn, as the engine draws at least one."""
        return () if self._body.max_tokens == 0 else items

    def _choice(self, request: Request, tokens: Sequence[int], text: str, first: bool) -> dict[str, Any]:
        """Text of one choice, and as "scored" the tokens that it stands for; the prompt too where it is echoed."""
        body, shown = self._body, list(self._kept(tokens))
        text = text if body.max_tokens != 0 else ""
        choice: dict[str, Any] = {"index": 0, "text": text, "logprobs": None, "scored": shown}
        if first and body.echo:
            prompt = request.prompt if request.prompt is not None else self._decoded(request)
            choice |= {"text": prompt + text, "scored": [*request.prompt_ids, *shown]}
        if body.return_token_ids:
            choice |= {"token_ids": shown, **({"prompt_token_ids": request.prompt_ids} if first else {})}
        if first and body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self._tokenizer, request.prompt_logprobs, body.prompt_logprobs)
        return choice

    def _decoded(self, request: Request) -> str:
        return b"".join(map(self._tokenizer.token_bytes, request.prompt_ids)).decode(errors="replace")

    def _whole_choice(self, place: int, completion: Completion) -> dict[str, Any]:
        request = self._requests[completion.index * self._drawn + completion.choice]
        choice = self._choice(request, completion.token_ids, completion.text, first=True)
        choice["index"] = place
        scored = choice.pop("scored")
        if self._body.logprobs is not None:
            echoed = (completion.prompt_logprobs or ()) if self._body.echo else ()
            items = [*echoed, *self._kept(completion.logprobs or [])]
            choice["logprobs"] = text_logprobs(self._tokenizer, scored, items, self._body.logprobs, 0)
        if self._body.reports:
            choice["speculative"] = report(self._tokenizer, completion, completion)
        return end(choice, completion)


def end(choice: dict[str, Any], completion: Completion | None) -> dict[str, Any]:
    """Says why a choice ended, and vLLM's `stop_reason`: the stop string or token id that ended it."""
    choice["finish_reason"] = None if completion is None else completion.finish_reason
    if completion is not None:
        choice["stop_reason"] = completion.stop_reason
    return choice


def count(
    event: dict[str, Any], body: Generation, written: Written, place: int, chunk: Chunk, prompts: Sequence[int]
) -> None:
    """Adds a chunk to what was written, and usage to its event where that is asked for."""
    written.tokens[place] = written.tokens.get(place, 0) + len(chunk.token_ids)
    if body.counted.continuous_usage_stats:
        event["usage"] = usage(sum(prompts), sum(written.tokens.values()))
    elif body.counted.include_usage:
        event["usage"] = None


def _best(completions: Sequence[Completion], count: int) -> list[Completion]:
    """The most probable completions, by log-probability per token, best first; all of them stay in order."""
    if count == len(completions):
        return list(completions)

    def score(completion: Completion) -> float:
        items = completion.logprobs or []
        return sum(item.logprob for item in items) / max(1, len(items))

    return sorted(completions, key=score, reverse=True)[:count]
