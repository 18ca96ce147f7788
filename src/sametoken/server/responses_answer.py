"""The form of /v1/responses: a list of output items, and a stream of typed, numbered events about them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from sametoken.engine.completion import Chunk, Completion
from sametoken.engine.request import TokenLogprob
from sametoken.server.answers import Head
from sametoken.server.replies import Spells, chat_logprobs, report, total_usage
from sametoken.server.responses_schema import ResponsesRequest
from sametoken.server.tools import Call, Reader
from sametoken.speculation.params import SamplingParams


class ResponsesAnswer:
    """/v1/responses."""

    def __init__(
        self, body: ResponsesRequest, head: Head, tokenizer: Spells, reader: Reader, params: SamplingParams
    ) -> None:
        self._body, self._head, self._tokenizer, self._reader = body, head, tokenizer, reader
        self._params = params
        self._number = 0
        self._message: dict[str, Any] | None = None  # the item under way, once there is text
        self._scored: list[TokenLogprob] = []

    def opening(self) -> Iterator[dict[str, Any]]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response("in_progress", []))

    def events(self, chunk: Chunk) -> Iterator[dict[str, Any]]:
        text, calls = self._reader.feed(0, chunk.text, chunk.completion is not None)
        self._scored += chunk.logprobs or []
        if text or (chunk.completion is not None and not calls and self._message is None):
            if self._message is None:
                self._message = _message("", "in_progress", [])
                yield self._event("response.output_item.added", output_index=0, item={**self._message, "content": []})
                yield self._about_text("response.content_part.added", part=_text("", []))
            scored = self._logprobs(self._scored)
            self._scored = []
            told = {"speculative": self._report(chunk)} if self._body.reports else {}
            yield self._about_text("response.output_text.delta", delta=text, logprobs=scored, **told)
        if chunk.completion is not None:
            yield from self._ends(chunk.completion, calls)

    def _ends(self, completion: Completion, calls: Sequence[Call]) -> Iterator[dict[str, Any]]:
        """What is left to say about the items, and about calls, which come whole."""
        output: list[dict[str, Any]] = []
        if self._message is not None:
            content, _ = self._reader.read(completion.text)
            scored = self._logprobs(completion.logprobs or [])
            item = {**_message(content, _status(completion), scored), "id": self._message["id"]}
            output.append(item)
            yield self._about_text("response.output_text.done", text=content, logprobs=scored)
            yield self._about_text("response.content_part.done", part=_text(content, scored))
            yield self._event("response.output_item.done", output_index=0, item=item)
        for call in calls:
            item, place = _call(call), len(output)
            output.append(item)
            begun = {**item, "arguments": "", "status": "in_progress"}
            about = {"item_id": item["id"], "output_index": place}
            yield self._event("response.output_item.added", output_index=place, item=begun)
            yield self._event("response.function_call_arguments.delta", **about, delta=call.arguments)
            yield self._event(
                "response.function_call_arguments.done", **about, name=call.name, arguments=call.arguments
            )
            yield self._event("response.output_item.done", output_index=place, item=item)
        kind = f"response.{_status(completion)}"
        yield self._event(kind, response=self._ended(completion, output))

    def closing(self, completions: Sequence[Completion]) -> Iterator[dict[str, Any]]:
        return iter(())

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        (completion,) = completions
        text, calls = self._reader.read(completion.text)
        output = [_message(text, _status(completion), self._logprobs(completion.logprobs or []))] if text else []
        if not text and not calls:
            output = [_message("", _status(completion), [])]
        return self._ended(completion, [*output, *map(_call, calls)])

    def _event(self, kind: str, **content: Any) -> dict[str, Any]:
        event = {"type": kind, "sequence_number": self._number, **content}
        self._number += 1
        return event

    def _about_text(self, kind: str, **content: Any) -> dict[str, Any]:
        assert self._message is not None
        return self._event(kind, item_id=self._message["id"], output_index=0, content_index=0, **content)

    def _logprobs(self, items: Sequence[TokenLogprob]) -> list[Any]:
        return list(chat_logprobs(self._tokenizer, items)["content"]) if self._body.scored else []

    def _report(self, chunk: Chunk) -> Any:
        return report(self._tokenizer, chunk, chunk.completion)

    def _ended(self, completion: Completion, output: Sequence[dict[str, Any]]) -> dict[str, Any]:
        response = self._response(_status(completion), output)
        counted = total_usage([completion])
        response["usage"] = {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": completion.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0, **counted["completion_tokens_details"]},
            "total_tokens": counted["total_tokens"],
        }
        if completion.finish_reason == "length":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if self._body.reports:
            response["speculative"] = report(self._tokenizer, completion, completion)
        return response

    def _response(self, status: str, output: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The object, with the settings that clients expect to find in it again."""
        body = self._body
        said = body.model_dump(include={"instructions", "max_output_tokens", "metadata", "top_logprobs", "user"})
        return {
            "id": self._head.id,
            "object": "response",
            "created_at": self._head.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._head.model,
            "output": list(output),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "temperature": self._params.temperature,
            "text": {"format": {"type": "text"}} if body.text is None else body.text.model_dump(by_alias=True),
            "tool_choice": body.model_dump()["tool_choice"] or "auto",
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_p": self._params.top_p,
            "truncation": "disabled",
            "usage": None,
            **said,
        }


def _status(completion: Completion) -> str:
    return "completed" if completion.finish_reason == "stop" else "incomplete"


def _message(text: str, status: str, logprobs: list[Any]) -> dict[str, Any]:
    about = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "status": status}
    return {**about, "content": [_text(text, logprobs)]}


def _text(text: str, logprobs: list[Any]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _call(call: Call) -> dict[str, Any]:
    made = call.to_json()
    about = {"id": f"fc_{secrets.token_hex(12)}", "type": "function_call", "call_id": made["id"], "status": "completed"}
    return {**about, "name": call.name, "arguments": call.arguments}
