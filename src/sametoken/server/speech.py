"""Separation of the choices of a request into reasoning, content, and tool calls."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Sequence
from typing import Any

from sametoken.server.reasoning import CALL, CONTENT, REASONING, Counted, Piece, Splitter, count_tokens
from sametoken.server.replies import Spells
from sametoken.server.tools import CallReader

# Fields of a message for each kind of text; clients read the reasoning by vLLM's newer or older name.
NAMES = {CONTENT: ("content",), REASONING: ("reasoning", "reasoning_content")}


class ReplyReader:
    """Reader of the replies to one request.

    Args:
        names: names of the functions that may be called.
        several: True if a reply may have several calls; otherwise only the first one counts.
        opening: function that makes a splitter for a new reply; None if the model does not mark its reasoning.
        shows_thinking: True if the reply has the reasoning.
    """

    def __init__(
        self,
        names: Collection[str] = (),
        several: bool = True,
        opening: Callable[[], Splitter] | None = None,
        shows_thinking: bool = True,
    ) -> None:
        self._names, self._several, self._opening, self._shows_thinking = names, several, opening, shows_thinking
        self._choices: dict[int, _Reading] = {}

    def feed(self, place: int, text: str, done: bool) -> list[Piece]:
        """Pieces that a text adds to choice `place`; `done` is True with the last text of the choice."""
        if place not in self._choices:
            splitter = None if self._opening is None else self._opening()
            self._choices[place] = _Reading(splitter, self._names, self._several, self._shows_thinking)
        return self._choices[place].feed(text, done)

    def counted(self, tokenizer: Spells, tokens: Sequence[int]) -> Counted:
        """Counts of the reasoning tokens and of the tokens before the content of a whole reply."""
        if self._opening is None:
            return Counted(0, 0)
        return count_tokens(self._opening(), [tokenizer.token_bytes(token) for token in tokens])


class _Reading:
    """State of reading one reply."""

    def __init__(self, splitter: Splitter | None, names: Collection[str], several: bool, shows_thinking: bool) -> None:
        self._splitter, self._calls = splitter, CallReader(names, several)
        self._names, self._several, self._shows_thinking = names, several, shows_thinking
        self._called, self._counts = 0, True  # number of calls with marks; True if the last counts

    def feed(self, text: str, done: bool) -> list[Piece]:
        parts = [Piece(CONTENT, text)] if self._splitter is None else self._splitter.feed(text, done)
        pieces: list[Piece] = []
        for part in parts:
            if part.kind == CONTENT:
                pieces += self._calls.feed(part.text)
            elif part.kind == REASONING:
                pieces += [part] if self._shows_thinking else []
            elif part.kind == CALL:
                self._called += 1
                self._counts = part.text in self._names and (self._several or self._called == 1)
                pieces += [part] if self._counts else []
            elif self._counts:
                pieces.append(part)
        return _joined([*pieces, *(self._calls.feed("", done=True) if done else ())])


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Pieces in which neighbours of one kind are joined, except calls."""
    joined: list[Piece] = []
    for piece in pieces:
        if joined and piece.kind == joined[-1].kind != CALL:
            joined[-1] = Piece(piece.kind, joined[-1].text + piece.text)
        else:
            joined.append(piece)
    return joined


class Message:
    """Message of /v1/chat/completions, built from pieces, and the delta that each piece adds to a stream.

    Args:
        begun: text at the beginning of the content.
    """

    def __init__(self, begun: str = "") -> None:
        self.calls: list[dict[str, Any]] = []
        self._texts = {REASONING: "", CONTENT: begun}

    def add(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Add pieces to the message, and return the delta of a stream for them."""
        delta: dict[str, Any] = {}
        for kind, text, _ in pieces:
            if kind in self._texts:
                self._texts[kind] += text
                for name in NAMES[kind]:
                    delta[name] = delta.get(name, "") + text
            elif kind == CALL:
                about = {"id": new_call_id(), "type": "function"}
                begun = {**about, "function": {"name": text, "arguments": ""}}
                delta.setdefault("tool_calls", []).append({"index": len(self.calls), **begun})
                self.calls.append({**about, "function": {"name": text, "arguments": ""}})
            else:
                self.calls[-1]["function"]["arguments"] += text
                index, entries = len(self.calls) - 1, delta.setdefault("tool_calls", [])
                if not entries or entries[-1]["index"] != index:
                    entries.append({"index": index, "function": {"arguments": ""}})
                entries[-1]["function"]["arguments"] += text
        return delta

    def to_json(self) -> dict[str, Any]:
        """Whole message as JSON."""
        content = self._texts[CONTENT] or (None if self.calls else "")
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        message |= dict.fromkeys(NAMES[REASONING], self._texts[REASONING] or None)
        return {**message, "tool_calls": self.calls} if self.calls else message


def new_call_id() -> str:
    """New id of a tool call, to which the result of the call refers."""
    return f"call_{secrets.token_hex(12)}"
