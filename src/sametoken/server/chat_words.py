"""Replies of /v1/chat/completions: messages with reasoning, text and tool calls, whole or as a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sametoken.engine.completion import Chunk, Completion
from sametoken.server.chat_schema import ChatRequest
from sametoken.server.replies import Usage, chat_logprobs, prompt_logprobs, report, total_usage
from sametoken.server.speech import Message
from sametoken.server.words import Event, Progress, Source, Words, end, parts


class ChatWords(Words):
    """Replies of /v1/chat/completions."""

    def __init__(self, body: ChatRequest, source: Source) -> None:
        self._body, self._reports = body, body.reports
        self._head, self._tokenizer, self._requests, self._reader = source
        self._scores = source.head.usual.spelling(self._tokenizer, body.return_tokens_as_token_ids)
        self._progress = Progress(body, source)
        # True if an event without a delta reports something else: scores, tokens, drafts or usage.
        scored = body.logprobs or body.prompt_logprobs is not None
        self._tells = bool(scored or body.return_token_ids or body.reports or self._progress.always)
        self._begin = self._head.of("chat.completion.chunk")  # first fields of every event
        self._messages = [Message() for _ in source.requests]

    def first(self) -> list[Event]:
        role = {"role": "assistant", "content": ""}
        ids = self._requests[0].prompt_ids if self._body.return_token_ids else None
        begun = {**self._begin, "prompt_token_ids": ids}
        events: list[Event] = []
        for place in range(len(self._requests)):
            choice = {"index": place, "delta": role, "logprobs": None, "finish_reason": None}
            events.append({**begun, "choices": [choice], **self._progress.usage(place)})
        for event in events if self._body.echoed else ():
            (choice,) = event["choices"]
            echoed = {**choice, "delta": {"content": self._body.echoed}}
            events = [*events, {**self._begin, "choices": [echoed], **self._progress.usage(choice["index"])}]
        return events

    def delta(self, chunk: Chunk) -> list[Event]:
        pieces = self._reader.feed(chunk.choice, chunk.text, chunk.completion is not None)
        delta = self._messages[chunk.choice].add(pieces)
        if not delta and chunk.completion is None and not self._tells:
            self._progress.count({}, chunk.choice, len(chunk.token_ids))
            return []
        # Clients that read usage in every chunk expect it to grow.
        if not delta or chunk.completion is None or self._progress.always:
            return [self._event(chunk, delta)]
        rest, ended = parts(chunk)
        return [self._event(rest, delta), self._event(ended, {})]

    def _event(self, chunk: Chunk, delta: dict[str, Any]) -> dict[str, Any]:
        """Event of a chunk; `delta` has the additions to the message."""
        body, request = self._body, self._requests[chunk.choice]
        choice: dict[str, Any] = {"index": chunk.choice, "delta": delta, "logprobs": None}
        if body.logprobs and chunk.logprobs:
            choice["logprobs"] = chat_logprobs(self._scores, chunk.logprobs)
        if self._reports:
            choice["speculative"] = report(self._tokenizer, chunk, chunk.completion)
        end(choice, chunk.completion, self._messages[chunk.choice].calls)
        choice["token_ids"] = chunk.token_ids if body.return_token_ids else None
        event = {**self._begin, "choices": [choice]}
        if body.prompt_logprobs is not None and chunk.choice == 0 and 0 not in self._progress.tokens:
            event["prompt_logprobs"] = prompt_logprobs(self._tokenizer, request.prompt_logprobs, body.prompt_logprobs)
        self._progress.count(event, chunk.choice, len(chunk.token_ids))
        return event

    def last(self, completions: Sequence[Completion]) -> list[Event]:
        if not self._progress.at_end:
            return []
        return [{**self._begin, "choices": [], "usage": self._usage(completions)}]

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        choices = [self._whole_choice(completion) for completion in completions]
        scores, ids = None, completions[0].prompt_token_ids if self._body.return_token_ids else None
        if self._body.prompt_logprobs is not None:
            items = completions[0].prompt_logprobs or []
            scores = prompt_logprobs(self._tokenizer, items, self._body.prompt_logprobs)
        reply = {**self._head.of("chat.completion"), "choices": choices, "usage": self._usage(completions)}
        return {**reply, "prompt_logprobs": scores, "prompt_token_ids": ids}

    def _whole_choice(self, completion: Completion) -> dict[str, Any]:
        message = Message(self._body.echoed)
        message.add(self._reader.feed(completion.choice, completion.text, True))
        choice: dict[str, Any] = {"index": completion.choice, "message": message.to_json()}
        scored = self._body.logprobs
        choice["logprobs"] = chat_logprobs(self._scores, completion.logprobs or []) if scored else None
        if self._reports:
            choice["speculative"] = report(self._tokenizer, completion, completion)
        choice["token_ids"] = completion.token_ids if self._body.return_token_ids else None
        return end(choice, completion, message.calls)

    def _usage(self, completions: Sequence[Completion]) -> Usage:
        thought = [self._reader.counted(self._tokenizer, completion.token_ids).reasoning for completion in completions]
        return total_usage(completions, sum(thought))
