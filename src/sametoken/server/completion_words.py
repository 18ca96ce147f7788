"""Replies of /v1/completions: choices with text, which begin with the prompt if `echo` is set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sametoken.engine.completion import Chunk, Completion
from sametoken.engine.request import Request
from sametoken.server.fields import WHOLE
from sametoken.server.replies import Usage, prompt_logprobs, report, text_logprobs, total_usage
from sametoken.server.schema import CompletionRequest
from sametoken.server.words import Event, Progress, Source, Words, end


class CompletionWords(Words):
    """Replies of /v1/completions."""

    def __init__(self, body: CompletionRequest, source: Source) -> None:
        self._body, self._drawn, self._reports = body, body.drawn, body.reports
        _, self._tokenizer, self._requests, _ = source
        self._scores = source.head.usual.spelling(self._tokenizer, body.return_tokens_as_token_ids)
        self._top = WHOLE if body.logprob_token_ids is not None else body.logprobs or 0  # alternatives to show
        self._progress = Progress(body, source)
        self._begin = source.head.of("text_completion")  # first fields of every object
        self._characters: dict[int, int] = {}  # characters of the text so far, by place of the choice

    def first(self) -> list[Event]:
        return []

    def delta(self, chunk: Chunk) -> list[Event]:
        place = chunk.index * self._drawn + chunk.choice
        request, body = self._requests[place], self._body
        first = place not in self._progress.tokens
        choice = self._choice(request, chunk.token_ids, chunk.text, first)
        choice["index"] = place
        if body.logprobs is not None:
            offset = self._characters.get(place, 0)
            items = [*(request.prompt_logprobs if first and body.echo else ()), *self._kept(chunk.logprobs or [])]
            words = text_logprobs(self._scores, choice.pop("scored"), items, self._top, offset)
            choice["logprobs"] = words
            self._characters[place] = offset + sum(map(len, words["tokens"]))
        choice.pop("scored", None)
        if self._reports:
            choice["speculative"] = report(self._tokenizer, chunk, chunk.completion)
        end(choice, chunk.completion)
        event = {**self._begin, "choices": [choice]}
        self._progress.count(event, place, len(chunk.token_ids))
        return [event]

    def last(self, completions: Sequence[Completion]) -> list[Event]:
        if not self._progress.at_end:
            return []
        return [{**self._begin, "choices": [], "usage": self._usage(completions)}]

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        chosen: list[Completion] = []
        for begin in range(0, len(completions), self._drawn):
            chosen += _best(completions[begin : begin + self._drawn], self._body.choices)
        choices = [self._whole_choice(place, completion) for place, completion in enumerate(chosen)]
        return {**self._begin, "choices": choices, "usage": self._usage(completions)}

    def _usage(self, completions: Sequence[Completion]) -> Usage:
        counted = total_usage(completions)
        if self._body.max_tokens == 0:
            counted["completion_tokens"], counted["total_tokens"] = 0, counted["prompt_tokens"]
        return counted

    def _kept(self, items: Sequence[Any]) -> Sequence[Any]:
        """Items of the tokens in the reply: none with max_tokens 0, for which the engine still draws one token."""
        return () if self._body.max_tokens == 0 else items

    def _shown(self, completion: Completion) -> Completion:
        """Completion with the tokens in the reply alone, see `_kept`."""
        if self._body.max_tokens == 0:
            return replace(completion, token_ids=[], origins=[], rejected=[], steps=completion.steps and [])
        return completion

    def _choice(self, request: Request, tokens: Sequence[int], text: str, first: bool) -> dict[str, Any]:
        """One choice: its text and, as "scored", the tokens of the text; both begin with the prompt if it is echoed."""
        body, shown = self._body, list(self._kept(tokens))
        text = text if body.max_tokens != 0 else ""
        choice: dict[str, Any] = {"index": 0, "text": text, "logprobs": None, "scored": shown}
        if first and body.echo:
            prompt = request.prompt if request.prompt is not None else self._decoded(request)
            choice |= {"text": prompt + text, "scored": [*request.prompt_ids, *shown]}
        choice["token_ids"] = shown if body.return_token_ids else None
        choice["prompt_token_ids"] = request.prompt_ids if body.return_token_ids and first else None
        if first and body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self._tokenizer, request.prompt_logprobs, body.prompt_logprobs)
        return choice

    def _decoded(self, request: Request) -> str:
        return b"".join(map(self._tokenizer.token_bytes, request.prompt_ids)).decode(errors="replace")

    def _whole_choice(self, place: int, completion: Completion) -> dict[str, Any]:
        request = self._requests[completion.index * self._drawn + completion.choice]
        choice = self._choice(request, completion.token_ids, completion.text, first=True)
        choice = {**choice, "index": place, "prompt_logprobs": choice.get("prompt_logprobs")}
        scored = choice.pop("scored")
        if self._body.logprobs is not None:
            echoed = (completion.prompt_logprobs or ()) if self._body.echo else ()
            items = [*echoed, *self._kept(completion.logprobs or [])]
            choice["logprobs"] = text_logprobs(self._scores, scored, items, self._top, 0)
        if self._reports:
            choice["speculative"] = report(self._tokenizer, self._shown(completion), completion)
        return end(choice, completion)


def _best(completions: Sequence[Completion], count: int) -> list[Completion]:
    """The `count` most probable completions by log-probability per token, the best first.

    If `count` is the number of completions, their order is unchanged.
    """
    if count == len(completions):
        return list(completions)

    def score(completion: Completion) -> float:
        items = completion.logprobs or []
        return sum(item.logprob for item in items) / max(1, len(items))

    return sorted(completions, key=score, reverse=True)[:count]
