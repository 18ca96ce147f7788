"""Replies of /v1/messages: a message of content blocks, and a stream of typed events about them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sametoken.engine.completion import Chunk, Completion
from sametoken.server.messages_schema import MessagesRequest
from sametoken.server.reasoning import ARGUMENTS, CALL, CONTENT, REASONING, Piece
from sametoken.server.replies import report
from sametoken.server.speech import new_call_id
from sametoken.server.words import Event, Source, Words

TYPES = {REASONING: "thinking", CONTENT: "text", CALL: "tool_use", ARGUMENTS: "tool_use"}
DELTAS = {"thinking": ("thinking_delta", "thinking"), "text": ("text_delta", "text"),
          "tool_use": ("input_json_delta", "partial_json")}  # fmt: skip


class MessagesWords(Words):
    """Replies of /v1/messages."""

    def __init__(self, body: MessagesRequest, source: Source) -> None:
        self._head, self._tokenizer, requests, self._reader = source
        self._reports = body.speculative is not None and body.speculative.reports
        self._prompt_tokens = len(requests[0].prompt_ids)
        self._events: list[Event] = []  # made since the previous chunk
        self._blocks: list[dict[str, Any]] = []  # in the order of the reply; the last one may be under way
        self._texts: list[str] = []  # text of each block; for a call, JSON of its input

    def first(self) -> list[Event]:
        usage = {**_usage(self._prompt_tokens, 0, 0), "output_tokens": 0}
        return [{"type": "message_start", "message": self._message(None, None, usage)}]

    def delta(self, chunk: Chunk) -> list[Event]:
        self._read(chunk.text, chunk.completion is not None)
        if chunk.completion is not None:
            reason, sequence = self._stopped(chunk.completion)
            delta = {"stop_reason": reason, "stop_sequence": sequence}
            ended = {"delta": delta, "usage": _usage_of(chunk.completion), **self._report(chunk.completion)}
            self._events.append({"type": "message_delta", **ended})
            self._events.append({"type": "message_stop"})
        events, self._events = self._events, []
        return events

    def last(self, completions: Sequence[Completion]) -> list[Event]:
        return []

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        (completion,) = completions
        self._read(completion.text, True)
        reason, sequence = self._stopped(completion)
        return self._message(reason, sequence, _usage_of(completion)) | self._report(completion)

    def _report(self, completion: Completion) -> dict[str, Any]:
        """Report of speculation for the whole reply, if requested; sent in a stream's last event but one."""
        return {"speculative": report(self._tokenizer, completion, completion)} if self._reports else {}

    def _read(self, text: str, done: bool) -> None:
        """Add a text; a reply without any content gets an empty block of text."""
        for piece in self._reader.feed(0, text, done):
            self._add(piece)
        if done:
            if not self._blocks:
                self._begin("text", "")
            self._close()

    def _add(self, piece: Piece) -> None:
        """Add a piece to the block that it belongs to."""
        kind = TYPES[piece.kind]
        if piece.kind == CALL or not self._blocks or self._blocks[-1]["type"] != kind:
            self._close()
            self._begin(kind, piece.text)
        if piece.kind != CALL:
            self._texts[-1] += piece.text
            name, key = DELTAS[kind]
            self._about("content_block_delta", delta={"type": name, key: piece.text})

    def _begin(self, kind: str, name: str) -> None:
        """Begin a new block; `name` is the name of a called tool."""
        block: dict[str, Any]
        match kind:
            case "tool_use":
                block = {"type": kind, "id": new_call_id(), "name": name, "input": {}}
            case "thinking":
                block = {"type": kind, "thinking": "", "signature": ""}
            case _:
                block = {"type": kind, "text": "", "citations": None}
        self._blocks.append(block)
        self._texts.append("")
        self._about("content_block_start", content_block=dict(block))

    def _close(self) -> None:
        """End the block under way."""
        if not self._blocks:
            return
        block, text = self._blocks[-1], self._texts[-1]
        if block["type"] == "tool_use":
            block["input"] = _object(text)
        else:
            block[block["type"]] = text
        self._about("content_block_stop")

    def _about(self, kind: str, **content: Any) -> None:
        """Add an event about the block under way."""
        self._events.append({"type": kind, "index": len(self._blocks) - 1, **content})

    def _stopped(self, completion: Completion) -> tuple[str, str | None]:
        """Reason for the end of the reply, and the stop sequence that ended it."""
        if completion.finish_reason == "length":
            return "max_tokens", None
        if any(block["type"] == "tool_use" for block in self._blocks):
            return "tool_use", None
        if isinstance(completion.stop_reason, str):
            return "stop_sequence", completion.stop_reason
        return "end_turn", None

    def _message(self, reason: str | None, sequence: str | None, usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._head.id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": self._blocks,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": usage,
        }


def _object(text: str) -> dict[str, Any]:
    """Input of a call; empty if the text is not a JSON object, for example because the length limit cut it."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _usage(prompt_tokens: int, cached: int, kept: int) -> dict[str, Any]:
    """Usage in Anthropic's form, in which `input_tokens` leaves out tokens that were cached or are newly kept."""
    return {
        "input_tokens": prompt_tokens - cached - kept,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": kept,
    }


def _usage_of(completion: Completion) -> dict[str, Any]:
    counted = _usage(len(completion.prompt_token_ids), completion.cached_tokens, completion.kept_tokens)
    return {**counted, "output_tokens": len(completion.token_ids)}
