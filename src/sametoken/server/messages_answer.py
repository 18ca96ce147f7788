"""The form of /v1/messages: a message of content blocks, and a stream of typed events about them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from sametoken.engine.completion import Chunk, Completion
from sametoken.server.answers import Head
from sametoken.server.reasoning import ARGUMENTS, CALL, CONTENT, REASONING, Piece
from sametoken.server.speech import Reader, new_call_id

TYPES = {REASONING: "thinking", CONTENT: "text", CALL: "tool_use", ARGUMENTS: "tool_use"}
DELTAS = {"thinking": ("thinking_delta", "thinking"), "text": ("text_delta", "text"),
          "tool_use": ("input_json_delta", "partial_json")}  # fmt: skip


class MessagesAnswer:
    """/v1/messages."""

    def __init__(self, head: Head, reader: Reader, prompt_tokens: int) -> None:
        self._head, self._reader, self._prompt_tokens = head, reader, prompt_tokens
        self._blocks: list[dict[str, Any]] = []  # in the order of the reply; the last one may be under way
        self._texts: list[str] = []  # of each block; JSON of a call's input

    def opening(self) -> Iterator[dict[str, Any]]:
        usage = {**_usage(self._prompt_tokens, 0), "output_tokens": 0}
        yield {"type": "message_start", "message": self._message(None, None, usage)}

    def events(self, chunk: Chunk) -> Iterator[dict[str, Any]]:
        for piece in self._reader.feed(0, chunk.text, chunk.completion is not None):
            yield from self._add(piece)
        if chunk.completion is not None:
            if not self._blocks:
                yield from self._begin("text", "")
            yield from self._close()
            reason, sequence = self._stopped(chunk.completion)
            delta = {"stop_reason": reason, "stop_sequence": sequence}
            yield {"type": "message_delta", "delta": delta, "usage": _usage_of(chunk.completion)}
            yield {"type": "message_stop"}

    def closing(self, completions: Sequence[Completion]) -> Iterator[dict[str, Any]]:
        return iter(())

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        (completion,) = completions
        for piece in self._reader.read(completion.text):
            list(self._add(piece))
        if not self._blocks:
            list(self._begin("text", ""))
        list(self._close())
        reason, sequence = self._stopped(completion)
        return self._message(reason, sequence, _usage_of(completion))

    def _add(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """Adds a piece to the block that it belongs to."""
        kind = TYPES[piece.kind]
        if piece.kind == CALL or not self._blocks or self._blocks[-1]["type"] != kind:
            yield from self._close()
            yield from self._begin(kind, piece.text)
        if piece.kind != CALL:
            self._texts[-1] += piece.text
            name, key = DELTAS[kind]
            yield self._about("content_block_delta", delta={"type": name, key: piece.text})

    def _begin(self, kind: str, name: str) -> Iterator[dict[str, Any]]:
        """A new block; `name` is that of a tool."""
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
        yield self._about("content_block_start", content_block=dict(block))

    def _close(self) -> Iterator[dict[str, Any]]:
        """Ends the block under way."""
        if not self._blocks:
            return
        block, text = self._blocks[-1], self._texts[-1]
        if block["type"] == "tool_use":
            block["input"] = _object(text)
        else:
            block[block["type"]] = text
        yield self._about("content_block_stop")

    def _about(self, kind: str, **content: Any) -> dict[str, Any]:
        """An event about the block under way."""
        return {"type": kind, "index": len(self._blocks) - 1, **content}

    def _stopped(self, completion: Completion) -> tuple[str, str | None]:
        """Why the reply ended, and the stop sequence that ended it."""
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
    """The input of a call that was cut by length, or is none, is empty."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _usage(prompt_tokens: int, cached: int) -> dict[str, Any]:
    """Anthropic counts what came from the cache apart."""
    return {
        "input_tokens": prompt_tokens - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
    }


def _usage_of(completion: Completion) -> dict[str, Any]:
    counted = _usage(len(completion.prompt_token_ids), completion.cached_tokens)
    return {**counted, "output_tokens": len(completion.token_ids)}
