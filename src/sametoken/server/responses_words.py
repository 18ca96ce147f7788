"""Replies of /v1/responses: a list of output items, and a stream of typed, numbered events about them."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Sequence
from typing import Any

from sametoken.engine.completion import Chunk, Completion
from sametoken.engine.request import TokenLogprob
from sametoken.server.reasoning import ARGUMENTS, CALL, CONTENT, REASONING, Piece
from sametoken.server.replies import chat_logprobs, report, total_usage
from sametoken.server.responses_schema import ResponsesRequest
from sametoken.server.speech import new_call_id
from sametoken.server.words import Event, Source, Words

TYPES = {REASONING: "reasoning", CONTENT: "message", CALL: "function_call", ARGUMENTS: "function_call"}
PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}  # prefixes of the ids of items, by type


class ResponsesWords(Words):
    """Replies of /v1/responses."""

    def __init__(self, body: ResponsesRequest, source: Source) -> None:
        self._body, self._params = body, source.requests[0].params
        self._head, self._tokenizer, _, self._reader = source
        self._number = 0
        self._events: list[Event] = []  # made since the previous chunk
        self._items: list[dict[str, Any]] = []  # in the order of the reply; the last one may be under way
        self._scored: list[TokenLogprob] = []  # log-probabilities for the next event of text

    def first(self) -> list[Event]:
        for kind in ("response.created", "response.in_progress"):
            self._event(kind, response=self._response("in_progress", []))
        return self._taken()

    def delta(self, chunk: Chunk) -> list[Event]:
        extra = {"speculative": report(self._tokenizer, chunk, chunk.completion)} if self._body.reports else {}
        self._scored += chunk.logprobs or []
        for piece in self._reader.feed(0, chunk.text, chunk.completion is not None):
            self._add(piece, extra)
            extra = {}
        if chunk.completion is not None:
            self._finish(chunk.completion, extra)
            kind = f"response.{_status(chunk.completion)}"
            self._event(kind, response=self._ended(chunk.completion))
        return self._taken()

    def last(self, completions: Sequence[Completion]) -> list[Event]:
        return []

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        (completion,) = completions
        for piece in self._reader.feed(0, completion.text, True):
            self._add(piece, {})
        self._finish(completion, {})
        return self._ended(completion)

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _add(self, piece: Piece, extra: dict[str, Any]) -> None:
        """Add a piece to its item; `extra` are further fields of its event."""
        kind = TYPES[piece.kind]
        if piece.kind == CALL or not self._items or self._items[-1]["type"] != kind:
            self._close("completed")
            self._begin(kind, piece.text)
        item = self._items[-1]
        if piece.kind == ARGUMENTS:
            item["arguments"] += piece.text
            self._about("response.function_call_arguments.delta", delta=piece.text, **extra)
        elif piece.kind == REASONING:
            item["content"][0]["text"] += piece.text
            self._about("response.reasoning_text.delta", content_index=0, delta=piece.text, **extra)
        elif piece.kind == CONTENT:
            scored, self._scored = self._logprobs(self._scored), []
            item["content"][0]["text"] += piece.text
            item["content"][0]["logprobs"] += scored
            self._about("response.output_text.delta", content_index=0, delta=piece.text, logprobs=scored, **extra)

    def _begin(self, kind: str, name: str) -> None:
        self._items.append(_item(kind, name))
        item = self._items[-1]
        begun = copy.deepcopy(item) | ({} if kind == "function_call" else {"content": []})
        self._event("response.output_item.added", output_index=len(self._items) - 1, item=begun)
        if kind != "function_call":
            self._about("response.content_part.added", content_index=0, part=copy.deepcopy(item["content"][0]))

    def _close(self, status: str) -> None:
        """End the item under way."""
        if not self._items:
            return
        item = self._items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            self._about("response.function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        else:
            part = copy.deepcopy(item["content"][0])
            if item["type"] == "message":
                texts = {"text": part["text"], "logprobs": part["logprobs"]}
                self._about("response.output_text.done", content_index=0, **texts)
            else:
                self._scored = []
                self._about("response.reasoning_text.done", content_index=0, text=part["text"])
            self._about("response.content_part.done", content_index=0, part=part)
        self._event("response.output_item.done", output_index=len(self._items) - 1, item=copy.deepcopy(item))

    def _finish(self, completion: Completion, extra: dict[str, Any]) -> None:
        """End the items; a reply without any content gets an empty message."""
        if not self._items:
            self._add(Piece(CONTENT, ""), extra)
        message = next((item for item in self._items if item["type"] == "message"), None)
        if message is not None:
            before = self._reader.counted(self._tokenizer, completion.token_ids).before_content
            message["content"][0]["logprobs"] = self._logprobs((completion.logprobs or [])[before:])
        self._close(_status(completion))

    def _about(self, kind: str, **content: Any) -> None:
        """Add an event about the item under way."""
        self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **content)

    def _event(self, kind: str, **content: Any) -> None:
        self._events.append({"type": kind, "sequence_number": self._number, **content})
        self._number += 1

    def _logprobs(self, items: Sequence[TokenLogprob]) -> list[Any]:
        return list(chat_logprobs(self._tokenizer, items)["content"]) if self._body.scored else []

    def _ended(self, completion: Completion) -> dict[str, Any]:
        response = self._response(_status(completion), self._items)
        counted = total_usage([completion], self._reader.counted(self._tokenizer, completion.token_ids).reasoning)
        response["usage"] = {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": completion.cached_tokens,
                "cache_write_tokens": completion.kept_tokens,
            },
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": counted["completion_tokens_details"],
            "total_tokens": counted["total_tokens"],
        }
        if completion.finish_reason == "length":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if self._body.enable_response_messages:
            response["input_messages"] = [self._raw(completion.prompt_token_ids)]
            response["output_messages"] = [self._raw(completion.token_ids)]
        if self._body.reports:
            response["speculative"] = report(self._tokenizer, completion, completion)
        if self._head.keep is not None:
            self._head.keep(response)
        return response

    def _raw(self, ids: list[int]) -> dict[str, Any]:
        text = b"".join(map(self._tokenizer.token_bytes, ids)).decode(errors="replace")
        return {"type": "raw_message_tokens", "message": text, "tokens": ids}

    def queued(self) -> dict[str, Any]:
        """Object of a response that waits in the queue."""
        return self._response("queued", [])

    def _response(self, status: str, output: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Object of the response, with settings of the request, which clients expect in it."""
        body = self._body
        settings = body.model_dump(
            include={"instructions", "max_output_tokens", "metadata", "previous_response_id", "top_logprobs", "user"}
        )
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
            "background": bool(body.background),
            "store": body.store is not False,
            "usage": None,
            **settings,
        }


def _status(completion: Completion) -> str:
    return "completed" if completion.finish_reason == "stop" else "incomplete"


def _item(kind: str, name: str) -> dict[str, Any]:
    """New item without content; `name` is the name of a called function."""
    about = {"type": kind, "id": f"{PREFIXES[kind]}_{secrets.token_hex(12)}", "status": "in_progress"}
    match kind:
        case "function_call":
            return {**about, "call_id": new_call_id(), "name": name, "arguments": ""}
        case "reasoning":
            return {**about, "summary": [], "content": [{"type": "reasoning_text", "text": ""}]}
        case _:
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            return {**about, "role": "assistant", "content": [part]}
