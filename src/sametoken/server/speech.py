"""The texts of a request's choices in pieces: reasoning, answer, and calls of functions."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Sequence
from typing import Any

from sametoken.server.reasoning import CALL, CONTENT, REASONING, Counted, Piece, Splitter, count_tokens
from sametoken.server.replies import Spells
from sametoken.server.tools import CallReader

# What a message calls its texts: vLLM had the second name of the reasoning before the first, and clients read either.
NAMES = {CONTENT: ("content",), REASONING: ("reasoning", "reasoning_content")}


class ReplyReader:
    """Reader of the replies to one request.

    Args:
        names: functions that may be called. `several`: whether more than the first call counts.
        opening: makes what splits a reply at its beginning; None where the model marks no thinking.
        thinks_aloud: whether the thinking is shown.
    """

    def __init__(
        self,
        names: Collection[str] = (),
        several: bool = True,
        opening: Callable[[], Splitter] | None = None,
        thinks_aloud: bool = True,
    ) -> None:
        self._names, self._several, self._opening, self._thinks_aloud = names, several, opening, thinks_aloud
        self._choices: dict[int, _Reading] = {}

    def feed(self, place: int, text: str, done: bool) -> list[Piece]:
        """Pieces that a text adds to choice `place`; `done` is true with the last text of the choice."""
        if place not in self._choices:
            splitter = None if self._opening is None else self._opening()
            self._choices[place] = _Reading(splitter, self._names, self._several, self._thinks_aloud)
        return self._choices[place].feed(text, done)

    def counted(self, tokenizer: Spells, tokens: Sequence[int]) -> Counted:
        """Counts of the reasoning tokens and of the tokens before the content of a whole reply."""
        if self._opening is None:
            return Counted(0, 0)
        return count_tokens(self._opening(), [tokenizer.token_bytes(token) for token in tokens])


class _Reading:
    """One reply."""

    def __init__(self, splitter: Splitter | None, names: Collection[str], several: bool, thinks_aloud: bool) -> None:
        self._splitter, self._calls = splitter, CallReader(names, several)
        self._names, self._several, self._thinks_aloud = names, several, thinks_aloud
        self._called, self._heard = 0, True  # calls that have marks of their own, and whether the last one counts

    def feed(self, text: str, done: bool) -> list[Piece]:
        parts = [Piece(CONTENT, text)] if self._splitter is None else self._splitter.feed(text, done)
        pieces: list[Piece] = []
        for part in parts:
            if part.kind == CONTENT:
                pieces += self._calls.feed(part.text)
            elif part.kind == REASONING:
                pieces += [part] if self._thinks_aloud else []
            elif part.kind == CALL:
                self._called += 1
                self._heard = part.text in self._names and (self._several or self._called == 1)
                pieces += [part] if self._heard else []
            elif self._heard:
                pieces.append(part)
        return _joined([*pieces, *(self._calls.feed("", done=True) if done else ())])


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Pieces with neighbours of one kind as one; every call stays one."""
    joined: list[Piece] = []
    for piece in pieces:
        if joined and piece.kind == joined[-1].kind != CALL:
            joined[-1] = Piece(piece.kind, joined[-1].text + piece.text)
        else:
            joined.append(piece)
    return joined


class Message:
    """A message of /v1/chat/completions, from its pieces; also what each of them adds to a stream.

    Args:
        begun: text that it begins with.
    """

    def __init__(self, begun: str = "") -> None:
        self.calls: list[dict[str, Any]] = []
        self._texts = {REASONING: "", CONTENT: begun}

    def add(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The delta that these pieces are."""
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
        """The whole message."""
        content = self._texts[CONTENT] or (None if self.calls else "")
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        message |= dict.fromkeys(NAMES[REASONING], self._texts[REASONING] or None)
        return {**message, "tool_calls": self.calls} if self.calls else message


def new_call_id() -> str:
    """New id of a tool call, to which the result of the call refers."""
    return f"call_{secrets.token_hex(12)}"
