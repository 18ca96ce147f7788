"""Separation of a model's reasoning from its answer by the model's own marks: an incremental state machine over text.

Styles of marks are data. The result does not depend on the pieces in which the text comes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from sametoken.errors import RequestError

REASONING, CONTENT, CALL, ARGUMENTS = "reasoning", "content", "call", "arguments"
SAME = "same"  # next state of a sign that is removed from the text and changes no state
BEGIN, HEADER = "begin", "header"  # before any text; between messages, where a header describes the next message
RECIPIENT = re.compile(r"to=functions\.([a-zA-Z0-9_.-]+)")
CHANNEL = re.compile(r"<\|channel\|>(\w+)")
FINAL = r"<\|channel\|>final[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>"


class Piece(NamedTuple):
    """Part of a reply.

    Attributes:
        kind: `reasoning`, `content`, `call` or `arguments` (of the last call).
        text: text of the part; for a call, the name of its function.
        start: character of the reply at which the text begins; -1 if it is not tracked.
    """

    kind: str
    text: str
    start: int = -1


class Style(NamedTuple):
    """Marks of the reasoning in the replies of a family of models.

    Attributes:
        marks: by state, the marks that end the state, each with the next state. Texts of the states `begin` and
            `header` are not part of the reply. The next state "" is read from the text of the header.
        otherwise: state after `begin` if the reply does not begin with a mark.
        trims: True if newlines around the reasoning belong to the marks.
        opens: mark that begins the reasoning; "" if there are several.
        closes: mark that ends the reasoning; "" if there are several.
        after: regular expression of the text between the reasoning and the answer.
    """

    marks: Mapping[str, Mapping[str, str]]
    otherwise: str
    trims: bool
    opens: str
    closes: str
    after: str

    def without(self, signs: Iterable[str]) -> Style:
        """This style with further signs, which are removed from all texts."""
        same = dict.fromkeys(set(signs) - self.every_mark, SAME)
        return self._replace(marks={state: {**same, **marks} for state, marks in self.marks.items()})

    @property
    def every_mark(self) -> set[str]:
        return {mark for marks in self.marks.values() for mark in marks}

    def closing(self, prompt: str) -> str:
        """Mark that ends the reasoning opened at the end of a prompt; "" if none is open."""
        return self.closes if self.opens and prompt.rstrip().endswith(self.opens) else ""

    def bound(self, tokens: int, begun: Splitter) -> dict[str, Any] | None:
        """Limit of the reasoning, by the keys of `ThoughtBound`; None if the reply has no reasoning.

        Args:
            tokens: largest number of reasoning tokens.
            begun: splitter at the beginning of the reply.

        Raises:
            RequestError: several marks can end this model's reasoning.
        """
        if not self.closes:
            words = "several marks can end the reasoning of this model"
            raise RequestError(words, field="thinking_token_budget", advice="leave it out, or set reasoning_effort")
        if begun.state == CONTENT:
            return None
        within = begun.state == REASONING or (begun.state == BEGIN and self.otherwise == REASONING)
        return {"tokens": tokens, "opens": self.opens, "closes": self.closes, "begun": within}

    def opening(self, prompt: str, continued: str | None) -> Splitter:
        """Splitter for the reply to a prompt, whose end may have opened or closed the reasoning already.

        Args:
            prompt: text of the prompt.
            continued: content of the message that the reply continues; None for a new message.
        """
        begun = Splitter(self)
        if HEADER in self.marks:
            begun.feed(prompt[max(0, prompt.rfind("<|start|>")) :])
            return Splitter(self, begun.state, begun.header)
        text = (prompt if continued is None else continued).rstrip()
        last = max((self.closes, self.opens), key=text.rfind)
        if text.endswith(last) or (continued is not None and last in text):
            return Splitter(self, REASONING if last == self.opens else CONTENT)
        return begun if continued is None else Splitter(self, CONTENT)


_THINK = {BEGIN: {"<think>": REASONING}, REASONING: {"</think>": CONTENT}, CONTENT: {}}
_END_MARKS = {"<|end|>": HEADER, "<|return|>": HEADER, "<|call|>": HEADER, "<|start|>": HEADER}
_HARMONY = {
    BEGIN: {"<|channel|>": HEADER, "<|start|>": HEADER},
    HEADER: {"<|message|>": "", **dict.fromkeys(_END_MARKS, HEADER)},
    **{state: {**_END_MARKS, "<|channel|>": HEADER} for state in (REASONING, CONTENT, ARGUMENTS)},
}
STYLES = {
    "qwen3": Style(_THINK, CONTENT, True, "<think>", "</think>", "</think>"),
    "deepseek_r1": Style(_THINK, REASONING, True, "<think>", "</think>", "</think>"),
    "openai_gptoss": Style(_HARMONY, CONTENT, False, "", "", FINAL),
}
SPELLINGS = {"deepseek-r1": "deepseek_r1"}  # TensorRT-LLM's spelling


def find_style(chosen: str, templates: Sequence[str]) -> Style | None:
    """Style of a model; None if its replies have no marks.

    Args:
        chosen: name of a style, `none`, or `auto` to find the style by the marks in the chat templates.
    """
    if chosen == "auto":
        text = "".join(templates)
        chosen = "openai_gptoss" if "<|channel|>" in text else "qwen3" if "</think>" in text else "none"
    return None if chosen == "none" else STYLES[SPELLINGS.get(chosen, chosen)]


class Splitter:
    """Splitter of one reply, which may come in pieces, into reasoning, content and calls.

    Args:
        style: style of the model.
        state: state at the beginning of the reply.
        header: part of the first message's header that the prompt contains.
    """

    def __init__(self, style: Style, state: str = BEGIN, header: str = "") -> None:
        self.style, self.state, self.header = style, state, header
        self._rest, self._at = "", 0  # text that may be part of a mark, and its first character in the reply
        self._line = ""  # newlines that are dropped at the end of the reasoning, and kept within it
        self._fresh = style.trims and state == REASONING  # True while newlines belong to the mark before them

    def feed(self, text: str, done: bool = False) -> list[Piece]:
        """Pieces that a text adds; `done` is True with the last text."""
        self._rest += text
        pieces: list[Piece] = []
        while self._step(pieces, done):
            pass
        return pieces

    def _step(self, pieces: list[Piece], done: bool) -> bool:
        """Process the text up to the next mark; return False if the rest is processed or needs more text."""
        marks = self.style.marks[self.state]
        if self.state == BEGIN:
            return self._begin(marks, done)
        found = min(((at, mark) for mark in marks if (at := self._rest.find(mark)) >= 0), default=None)
        end = len(self._rest) - (0 if done else begun_mark(self._rest, marks)) if found is None else found[0]
        self._take(self._rest[:end], pieces)
        self._pass(end if found is None else end + len(found[1]))
        if found is not None and marks[found[1]] != SAME:
            self._enter(found[1], marks[found[1]], pieces)
        return found is not None

    def _begin(self, marks: Mapping[str, str], done: bool) -> bool:
        text = self._rest.lstrip()
        mark = next((mark for mark in marks if text.startswith(mark)), None)
        if mark is not None:
            self._pass(len(self._rest) - len(text) + len(mark))
            if marks[mark] != SAME:
                self._enter(mark, marks[mark], [])
        elif not done and any(each.startswith(text) for each in marks):
            return False
        else:
            self.state = self.style.otherwise
            self._fresh = self.style.trims and self.state == REASONING
        return True

    def _pass(self, size: int) -> None:
        self._rest, self._at = self._rest[size:], self._at + size

    def _enter(self, mark: str, state: str, pieces: list[Piece]) -> None:
        """Change to the state after a mark."""
        if state == HEADER:
            self.header = mark if self.state != HEADER or mark == "<|start|>" else self.header + mark
        elif not state:
            state = self._message(pieces)
        self.state = state
        self._line, self._fresh = "", self.style.trims

    def _message(self, pieces: list[Piece]) -> str:
        """State of the message that a header announces."""
        if (named := RECIPIENT.search(self.header)) is not None:
            pieces.append(Piece(CALL, named[1]))
            return ARGUMENTS
        channel = CHANNEL.search(self.header)
        return REASONING if channel is not None and channel[1] == "analysis" else CONTENT

    def _take(self, text: str, pieces: list[Piece]) -> None:
        """Add a text of the current state to the pieces or to the header."""
        if self.state == HEADER:
            self.header += text
            return
        end = self._at + len(text)
        if self._fresh:
            text = text.lstrip("\n")
            self._fresh = not text
        text, self._line = self._line + text, ""
        if self.style.trims and self.state == REASONING:
            shown = text.rstrip("\n")
            text, self._line = shown, text[len(shown) :]
        if text:
            pieces.append(Piece(self.state, text, end - len(self._line) - len(text)))


def begun_mark(text: str, marks: Sequence[str] | Mapping[str, str]) -> int:
    """Length of the longest suffix of a text that is a prefix of one of these marks."""
    sizes = (n for mark in marks for n in range(1, min(len(mark), len(text) + 1)) if text.endswith(mark[:n]))
    return max(sizes, default=0)


class Counted(NamedTuple):
    """Numbers of tokens of a reply.

    Attributes:
        reasoning: tokens of the reasoning, without its marks.
        before_content: tokens before the first token of the content.
    """

    reasoning: int
    before_content: int


def count_tokens(splitter: Splitter, spelled: Sequence[bytes]) -> Counted:
    """Count the tokens of a whole reply that belong to the reasoning, and those before the content.

    Args:
        splitter: splitter at the beginning of the reply.
        spelled: bytes of each token.
    """
    text = b"".join(spelled).decode("latin-1")  # one character for every byte; marks are ASCII
    pieces = splitter.feed(text, done=True)
    thought = [(piece.start, piece.start + len(piece.text)) for piece in pieces if piece.kind == REASONING]
    content = min((piece.start for piece in pieces if piece.kind == CONTENT), default=len(text))
    stops = list(accumulate(map(len, spelled)))
    begins = [end - len(piece) for end, piece in zip(stops, spelled, strict=True)]
    return Counted(sum(any(a <= at < b for a, b in thought) for at in begins), sum(end <= content for end in stops))
