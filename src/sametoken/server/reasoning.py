"""Separates a model's reasoning from its answer by the model's own marks: an incremental state machine over text.

Styles of marks are data. The result does not depend on how the text is cut into pieces.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from sametoken.errors import RequestError

REASONING, CONTENT, CALL, ARGUMENTS = "reasoning", "content", "call", "arguments"
SAME = "same"  # the state after what is left out of the text
BEGIN, HEADER = "begin", "header"  # before anything was said; between messages, where text says what follows
RECIPIENT = re.compile(r"to=functions\.([a-zA-Z0-9_.-]+)")
CHANNEL = re.compile(r"<\|channel\|>(\w+)")
FINAL = r"<\|channel\|>final[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>"


class Piece(NamedTuple):
    """A part of a reply.

    Attributes:
        kind: `reasoning`, `content`, `call` (its text is the name of a function) or `arguments` (of the last call).
        start: where its text begins in the reply.
    """

    kind: str
    text: str
    start: int = -1


class Style(NamedTuple):
    """Markup of thinking in the replies of a family of models.

    Attributes:
        marks: by state, the marks that end it and the state that follows; texts of the states `begin` and `header` are
            not shown. From `header`, the state that follows a message's beginning is read from its text.
        otherwise: the state after `begin` where the reply does not begin with a mark.
        trims: whether newlines around the thinking belong to the marks.
        opens, closes: what begins and ends thinking, where that is always the same.
        after: regular expression of what ends it and begins what is said.
    """

    marks: Mapping[str, Mapping[str, str]]
    otherwise: str
    trims: bool
    opens: str
    closes: str
    after: str

    def without(self, signs: Iterable[str]) -> Style:
        """This style with signs that are left out of every text."""
        same = dict.fromkeys(set(signs) - self.every_mark, SAME)
        return self._replace(marks={state: {**same, **marks} for state, marks in self.marks.items()})

    @property
    def every_mark(self) -> set[str]:
        return {mark for marks in self.marks.values() for mark in marks}

    def closing(self, prompt: str) -> str:
        """Mark that ends the thinking opened at the end of a prompt; "" if none is open."""
        return self.closes if self.opens and prompt.rstrip().endswith(self.opens) else ""

    def bound(self, tokens: int, begun: Splitter) -> dict[str, Any] | None:
        """A limit of the thinking, as `ThoughtBound` has it; None where there is none to limit.

        Args:
            begun: a splitter at the beginning of the reply.

        Raises:
            RequestError: no one mark ends this model's thinking.
        """
        if not self.closes:
            words = "no one mark ends the thinking of this model"
            raise RequestError(words, field="thinking_token_budget", advice="leave it out; reasoning_effort says less")
        if begun.state == CONTENT:
            return None
        within = begun.state == REASONING or (begun.state == BEGIN and self.otherwise == REASONING)
        return {"tokens": tokens, "opens": self.opens, "closes": self.closes, "begun": within}

    def opening(self, prompt: str, continued: str | None) -> Splitter:
        """A splitter for the reply to a prompt, whose end may have opened or closed thinking already.

        Args:
            prompt: its text. `continued`: the content of the message that the reply continues, if it does.
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
SPELLINGS = {"deepseek-r1": "deepseek_r1"}  # of TensorRT-LLM


def find_style(chosen: str, templates: Sequence[str]) -> Style | None:
    """The style of a model.

    Args:
        chosen: a name, `none`, or `auto` to find it by the marks in the chat templates.
    """
    if chosen == "auto":
        text = "".join(templates)
        chosen = "openai_gptoss" if "<|channel|>" in text else "qwen3" if "</think>" in text else "none"
    return None if chosen == "none" else STYLES[SPELLINGS.get(chosen, chosen)]


class Splitter:
    """Splits one reply, which may come in pieces.

    Args:
        style: the model's. `state`: where the reply begins. `header`: what the prompt said of its first message.
    """

    def __init__(self, style: Style, state: str = BEGIN, header: str = "") -> None:
        self.style, self.state, self.header = style, state, header
        self._rest, self._at = "", 0  # what is not decided yet, and where it begins in the reply
        self._line = ""  # newlines that are dropped at the end of the thinking, and shown within it
        self._fresh = style.trims and state == REASONING  # newlines to come belong to the mark before them

    def feed(self, text: str, done: bool = False) -> list[Piece]:
        """The pieces that a text adds; `done` with the last one."""
        self._rest += text
        pieces: list[Piece] = []
        while self._step(pieces, done):
            pass
        return pieces

    def _step(self, pieces: list[Piece], done: bool) -> bool:
        """Take the text up to the next mark; False where the rest is taken or waits."""
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
        """Go on to the state after a mark."""
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
        """Show the text of a state."""
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
    """Length of the longest end of a text that begins one of these marks."""
    sizes = (n for mark in marks for n in range(1, min(len(mark), len(text) + 1)) if text.endswith(mark[:n]))
    return max(sizes, default=0)


class Counted(NamedTuple):
    """Numbers of reply tokens: those of the thinking without marks, and those before the first token of the content."""

    reasoning: int
    before_content: int


def count_tokens(splitter: Splitter, spelled: Sequence[bytes]) -> Counted:
    """Count the tokens of a whole reply by what they say.

    Args:
        splitter: at the beginning of the reply. `spelled`: the bytes of each token.
    """
    text = b"".join(spelled).decode("latin-1")  # a character for every byte; marks are ASCII
    pieces = splitter.feed(text, done=True)
    thought = [(piece.start, piece.start + len(piece.text)) for piece in pieces if piece.kind == REASONING]
    said = min((piece.start for piece in pieces if piece.kind == CONTENT), default=len(text))
    stops = list(accumulate(map(len, spelled)))
    begins = [end - len(piece) for end, piece in zip(stops, spelled, strict=True)]
    return Counted(sum(any(a <= at < b for a, b in thought) for at in begins), sum(end <= said for end in stops))
