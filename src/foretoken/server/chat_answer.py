"""The form of /v1/chat/completions: messages with text and calls of functions, whole or in pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from foretoken.engine.completion import Chunk, Completion
from foretoken.engine.request import Request
from foretoken.server.answers import Head, Written, count, end
from foretoken.server.chat_schema import ChatRequest
from foretoken.server.replies import Spells, chat_logprobs, prompt_logprobs, report, total_usage
from foretoken.server.tools import Call, read_calls, sure


class ChatAnswer:
    """/v1/chat/completions."""

    def __init__(self, body: ChatRequest, head: Head, requests: Sequence[Request], tokenizer: Spells) -> None:
        self._body, self._head, self._tokenizer, self._requests = body, head, tokenizer, requests
        self._written = Written()
        self._names = {function.name for function in body.offered}
        self._texts: dict[int, str] = {}  # of each choice, so far
        self._shown: dict[int, int] = {}  # how much of it is out

    def opening(self) -> Iterator[dict[str, Any]]:
        for index in range(len(self._requests)):
            yield self._event({"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})

    def _event(self, choice: dict[str, Any]) -> dict[str, Any]:
        event = {**self._head.of("chat.completion.chunk"), "choices": [choice]}
        if self._body.counted.include_usage:
            event["usage"] = None
        return event

    def event(self, chunk: Chunk) -> dict[str, Any]:
        body, request = self._body, self._requests[chunk.choice]
        delta = self._delta(chunk)
        choice: dict[str, Any] = {"index": chunk.choice, "delta": delta}
        choice["logprobs"] = chat_logprobs(self._tokenizer, chunk.logprobs or []) if body.logprobs else None
        if body.reports:
            choice["speculative"] = report(self._tokenizer, chunk.token_ids, chunk.origins, chunk.completion)
        end(choice, chunk.completion)
        if "tool_calls" in delta:
            choice["finish_reason"] = "tool_calls"
        event = self._event(choice)
        if body.prompt_logprobs is not None and chunk.choice == 0 and 0 not in self._written.tokens:
            event["prompt_logprobs"] = prompt_logprobs(self._tokenizer, request.prompt_logprobs, body.prompt_logprobs)
        count(event, body, self._written, chunk.choice, chunk, [len(request.prompt_ids)])
        return event

    def _delta(self, chunk: Chunk) -> dict[str, Any]:
        """What a chunk adds to the message; text that may turn out to be a call waits for the end."""
        place, done = chunk.choice, chunk.completion is not None
        if not self._names:
            return {"content": chunk.text} if chunk.text else {}
        text = self._texts[place] = self._texts.get(place, "") + chunk.text
        calls: list[Call] = []
        if done:
            text, calls = self._read(text)
        before = self._shown.get(place, 0)
        shown = self._shown[place] = max(before, len(text) if done else sure(text))
        delta: dict[str, Any] = {"content": text[before:shown]} if shown > before else {}
        if calls:
            delta["tool_calls"] = [{"index": i, **call.to_json()} for i, call in enumerate(calls)]
        return delta

    def _read(self, text: str) -> tuple[str, list[Call]]:
        """Content and calls of a whole reply."""
        if not self._names:
            return text, []
        content, calls = read_calls(text, self._names)
        return content, calls[:1] if self._body.parallel_tool_calls is False else calls

    def closing(self, completions: Sequence[Completion]) -> Iterator[dict[str, Any]]:
        if self._body.counted.include_usage:
            yield {**self._head.of("chat.completion.chunk"), "choices": [], "usage": total_usage(completions)}

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        choices = [self._whole_choice(completion) for completion in completions]
        reply = {**self._head.of("chat.completion"), "choices": choices, "usage": total_usage(completions)}
        if self._body.prompt_logprobs is not None:
            items = completions[0].prompt_logprobs or []
            reply["prompt_logprobs"] = prompt_logprobs(self._tokenizer, items, self._body.prompt_logprobs)
        return reply

    def _whole_choice(self, completion: Completion) -> dict[str, Any]:
        content, calls = self._read(completion.text)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message |= {"content": content or None, "tool_calls": [call.to_json() for call in calls]}
        choice: dict[str, Any] = {"index": completion.choice, "message": message}
        scored = self._body.logprobs
        choice["logprobs"] = chat_logprobs(self._tokenizer, completion.logprobs or []) if scored else None
        if self._body.reports:
            choice["speculative"] = report(self._tokenizer, completion.token_ids, completion.origins, completion)
        end(choice, completion)
        if calls:
            choice["finish_reason"] = "tool_calls"
        return choice
