"""Tokens of a conversation that the assistant wrote: those that a draft learns to predict.

Few chat templates mark them. So a conversation is rendered again with another text in the place of a turn: where the
two renderings differ is the turn. This works for repeated and quoted answers, for templates that strip, drop or add
text, and for templates that refuse parts of a conversation.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sametoken.checkpoint.chat import Marked, unused_signs
from sametoken.checkpoint.tokenizer import Tokenizer
from sametoken.errors import DataError, RequestError

ASSISTANT = "assistant"


class Masked(NamedTuple):
    """A conversation as tokens.

    Attributes:
        tokens: ids, special tokens included. `mask`: as many; True where the assistant said the token.
        as_served: the text before the last answer is the prompt that a server would answer. If not, the template
            shows past turns otherwise than present ones, and a draft learns from prompts that it never meets.
        ended: every answer that should ends with a token that ends a turn. If not, a draft never learns to end one.
    """

    tokens: list[int]
    mask: list[bool]
    as_served: bool = True
    ended: bool = True


class Answers(NamedTuple):
    """A rendered conversation and its answers.

    Attributes:
        spans: [start, end) of each in `text`.
        closing: what follows the words of the last one when no message does.
        as_served: see `Masked`.
    """

    text: str
    spans: list[tuple[int, int]]
    closing: str
    as_served: bool


class Rules(NamedTuple):
    """Rules for rendering conversations and for the tokens that count in the loss.

    Attributes:
        end_of_turn: the token with which a model ends its answer counts too.
        variables: what the chat template reads besides the messages, for example `enable_thinking`.
    """

    end_of_turn: bool = True
    variables: Mapping[str, Any] = {}


USUAL = Rules()


def mask_text(tokenizer: Tokenizer, text: str) -> Masked:
    """A text without turns: all of it counts."""
    tokens = tokenizer.encode(text)
    return Masked(tokens, [True] * len(tokens))


def mask_conversation(
    tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], rules: Rules = USUAL, *, cut: bool = False
) -> Masked:
    """The tokens of a conversation, and which of them the assistant said.

    One tokenisation of the whole text; a token counts if any of its characters lies in an answer.

    Args:
        messages: with role and content, oldest first.
        cut: the last answer was cut by length: whatever ends it was not said.

    Raises:
        RequestError: there is no chat template, or it refuses the conversation.
        DataError: nothing counts, with the reason.
    """
    found = find_answers(tokenizer, messages, rules)
    line = _Line(tokenizer, found)
    mask, ended = [False] * len(line.tokens), True
    for number, span in enumerate(found.spans, 1):
        first, stop = line.said(span)
        if first < stop and rules.end_of_turn and not (cut and number == len(found.spans)):
            words, stop = stop, line.past_closing(stop)
            ended = ended and words < stop
        mask[first:stop] = [True] * (stop - first)
    if not any(mask):
        raise DataError(_why_empty(messages, found))
    return Masked(line.tokens, mask, found.as_served, ended)


def find_answers(tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], rules: Rules = USUAL) -> Answers:
    """The text of a conversation and where the assistant speaks in it, from after the header that a server writes.

    Raises:
        RequestError: there is no chat template, or it refuses the conversation.
        DataError: it refuses every change of an answer, so the answer cannot be found.
    """
    conversation = _Conversation(tokenizer, messages, rules.variables)
    text, generated = conversation.whole
    turns = [place for place, message in enumerate(messages) if message["role"] == ASSISTANT]
    if not turns:
        return Answers(text, [], "", True)
    served = conversation.prompt(turns[-1])
    closing = conversation.closing(turns[-1])
    # A template that marks answers with `{% generation %}` knows them best.
    spans = generated or [conversation.answer(place) for place in turns]
    return Answers(text, spans, closing, served is None or text.startswith(served))


class _Conversation:
    """A conversation under a chat template, and what changes where in its rendering."""

    def __init__(self, tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], variables: Mapping[str, Any]) -> None:
        self._tokenizer, self._messages, self._variables = tokenizer, messages, variables
        self.whole: Marked = tokenizer.render_marked(messages, **variables)
        self._sign = next(unused_signs(self.whole.text))

    def prompt(self, place: int) -> str | None:
        """Prompt that a server would render for message `place`; None if the template refuses."""
        try:
            return self._render(self._messages[:place], prompt=True)
        except RequestError:
            return None

    def answer(self, place: int) -> tuple[int, int]:
        """[start, end) of what the assistant said as message `place`, with what the template adds and it would say.

        Raises:
            DataError: the template refuses another text in its place.
        """
        text, prompt = self.whole.text, self.prompt(place)
        start, end = self._differing(place)
        if prompt is None or start == end:
            return start, end
        if text.startswith(prompt):
            return min(len(prompt), end), end
        # The past is shown otherwise than when it was the present, so only what follows the last message is compared.
        _, before = self._differing(place - 1)
        if before > start:  # the template does not show that message
            return start, end
        tail = prompt[len(prompt) - self._unmoved(place, prompt) :]
        return min(before + common_prefix(tail, text[before:]), end), end

    def closing(self, place: int) -> str:
        """Text after message `place` as the last message; "" if the template refuses or changes earlier text."""
        text, end = self.whole.text, self._differing(place)[1]
        try:
            alone = self._render(self._messages[: place + 1], prompt=False)
        except RequestError:
            return ""
        return alone[end:] if alone[:end] == text[:end] else ""

    def _differing(self, place: int) -> tuple[int, int]:
        """Start and end of the part of the whole text that depends on message `place`."""
        text = self.whole.text
        changed = self._changed(self._messages, place, prompt=False)
        start = common_prefix(text, changed)
        return start, len(text) - common_suffix(text[start:], changed[start:])

    def _unmoved(self, place: int, prompt: str) -> int:
        """Number of characters at the end of the prompt for message `place` independent of the message before."""
        return common_suffix(prompt, self._changed(self._messages[:place], place - 1, prompt=True))

    def _changed(self, messages: Sequence[dict[str, Any]], place: int, *, prompt: bool) -> str:
        """A rendering with another text for message `place`."""
        message, refused = messages[place], ""
        # Without tool calls and thinking first, so that they belong to what changes; some templates insist on them.
        for other in ({"role": message["role"], "content": self._sign}, {**message, "content": self._sign}):
            try:
                return self._render([*messages[:place], other, *messages[place + 1 :]], prompt=prompt)
            except RequestError as error:
                refused = str(error)
        raise DataError(f"message {place + 1} cannot be found in the text that the chat template makes: {refused}")

    def _render(self, messages: Sequence[dict[str, Any]], *, prompt: bool) -> str:
        return self._tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, **self._variables)


def common_prefix(a: str, b: str) -> int:
    """Number of characters that two texts have in common at their start."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def common_suffix(a: str, b: str) -> int:
    """Number of characters that two texts have in common at their end."""
    return common_prefix(a[::-1], b[::-1])


class _Line:
    """A rendered conversation as tokens, and where they lie in its text."""

    def __init__(self, tokenizer: Tokenizer, found: Answers) -> None:
        self._tokenizer, self._text, self._closing = tokenizer, found.text, found.closing.lstrip()
        self.tokens, self._places = tokenizer.encode_spans(found.text)
        self._stops = [end for _, end in self._places]

    def said(self, span: tuple[int, int]) -> tuple[int, int]:
        """[first, stop) of the tokens with a character in `span`, without those that end the turn."""
        start, end = span
        first = stop = bisect_right(self._stops, start)
        # A token of trimmed spaces is empty and lies where it ends.
        while stop < len(self.tokens) and (self._places[stop][0] < end or self._stops[stop] <= end):
            stop += 1
        while stop > first and self._closes(stop - 1):
            stop -= 1
        return first, stop

    def past_closing(self, stop: int) -> int:
        """The index after the token that ends the turn, spaces before it included; `stop` where there is none."""
        for at in range(stop, len(self.tokens)):
            if self._closes(at):
                return at + 1
            if self._spelled(at):
                break
        return stop

    def _closes(self, at: int) -> bool:
        """True if a model ends its turn with this token: an end token, or a special one where the template has it."""
        token, spelled = self.tokens[at], self._spelled(at)
        special = token in self._tokenizer.special_ids and spelled != ""
        return token in self._tokenizer.eos_ids or (special and self._closing.startswith(spelled))

    def _spelled(self, at: int) -> str:
        start, end = self._places[at]
        return self._text[start:end].strip()


def _why_empty(messages: Sequence[dict[str, Any]], found: Answers) -> str:
    answers = [message for message in messages if message["role"] == ASSISTANT]
    if not answers:
        return "no token counts: there is no assistant turn; remove the conversation, or set --all-tokens"
    if not any(str(message.get("content") or "").strip() or message.get("tool_calls") for message in answers):
        return "no token counts: every assistant turn is empty; remove the conversation"
    return (
        f"no token counts: the chat template shows none of the {len(answers)} assistant turns "
        f"(its text is {found.text[:80]!r}...); correct the template"
    )


def spans_of(mask: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """[start, end) of every run of True."""
    start = None
    for at, counts in enumerate([*mask, False]):
        if counts and start is None:
            start = at
        elif not counts and start is not None:
            yield start, at
            start = None
