"""Loss masks: the tokens of a conversation that the assistant generated, which a draft learns to predict.

Few chat templates mark them. So a conversation is rendered again with another text in place of a turn: the turn is
where the two renderings differ. This works for repeated and quoted answers, for templates that strip, drop or add
text, and for templates that reject parts of a conversation.
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
    """Tokens of a conversation, with their loss mask.

    Attributes:
        tokens: ids, special tokens included.
        mask: True for each token that the assistant generated.
        as_served: true if the text before the last answer is the prompt that a server would render. If not, the
            template renders past turns differently, and a draft learns from prompts that never occur.
        ended: true if every complete answer ends with an end token. If not, a draft never learns to end an answer.
    """

    tokens: list[int]
    mask: list[bool]
    as_served: bool = True
    ended: bool = True


class Answers(NamedTuple):
    """Rendered conversation with the places of its answers.

    Attributes:
        spans: [start, end) of each answer in `text`.
        closing: text after the last answer if it is the last message.
        as_served: see `Masked`.
    """

    text: str
    spans: list[tuple[int, int]]
    closing: str
    as_served: bool


class Rules(NamedTuple):
    """Rules for rendering conversations and for the tokens that count in the loss.

    Attributes:
        end_of_turn: true if the end token of an answer counts too.
        variables: further variables of the chat template, for example `enable_thinking`.
    """

    end_of_turn: bool = True
    variables: Mapping[str, Any] = {}


USUAL = Rules()


def mask_text(tokenizer: Tokenizer, text: str) -> Masked:
    """Tokenise a text without turns, all of which counts."""
    tokens = tokenizer.encode(text)
    return Masked(tokens, [True] * len(tokens))


def mask_conversation(
    tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], rules: Rules = USUAL, *, cut: bool = False
) -> Masked:
    """Tokenise a conversation and mask the tokens that the assistant generated.

    The whole text is tokenised at once; a token counts if any of its characters is in an answer.

    Args:
        messages: messages with role and content, oldest first.
        cut: true if the last answer was cut by length, so that the model did not end it.

    Raises:
        RequestError: there is no chat template, or it rejects the conversation.
        DataError: no token counts; the message has the reason.
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
    """Render a conversation and find the assistant's answers, which begin after the header that a server adds.

    Raises:
        RequestError: there is no chat template, or it rejects the conversation.
        DataError: it rejects every change of an answer, so the answer cannot be found.
    """
    conversation = _Conversation(tokenizer, messages, rules.variables)
    text, generated = conversation.whole
    turns = [place for place, message in enumerate(messages) if message["role"] == ASSISTANT]
    if not turns:
        return Answers(text, [], "", True)
    served = conversation.prompt(turns[-1])
    closing = conversation.closing(turns[-1])
    # Answers that a template marks with `{% generation %}` are exact.
    spans = generated or [conversation.answer(place) for place in turns]
    return Answers(text, spans, closing, served is None or text.startswith(served))


class _Conversation:
    """Conversation under a chat template, for comparison of its renderings."""

    def __init__(self, tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], variables: Mapping[str, Any]) -> None:
        self._tokenizer, self._messages, self._variables = tokenizer, messages, variables
        self.whole: Marked = tokenizer.render_marked(messages, **variables)
        self._sign = next(unused_signs(self.whole.text))

    def prompt(self, place: int) -> str | None:
        """Prompt that a server would render for message `place`; None if the template rejects it."""
        try:
            return self._render(self._messages[:place], prompt=True)
        except RequestError:
            return None

    def answer(self, place: int) -> tuple[int, int]:
        """[start, end) of the assistant's text of message `place`, with text of the template that it would generate.

        Raises:
            DataError: the template rejects another text in its place.
        """
        text, prompt = self.whole.text, self.prompt(place)
        start, end = self._differing(place)
        if prompt is None or start == end:
            return start, end
        if text.startswith(prompt):
            return min(len(prompt), end), end
        # Past turns may be rendered differently from the last one, so only the text after the last message is compared.
        _, before = self._differing(place - 1)
        if before > start:  # the template does not render that message
            return start, end
        tail = prompt[len(prompt) - self._unmoved(place, prompt) :]
        return min(before + common_prefix(tail, text[before:]), end), end

    def closing(self, place: int) -> str:
        """Text after message `place` as the last message; "" if the template rejects it or changes earlier text."""
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
        """Number of characters at the end of the prompt for message `place` not depending on the message before."""
        return common_suffix(prompt, self._changed(self._messages[:place], place - 1, prompt=True))

    def _changed(self, messages: Sequence[dict[str, Any]], place: int, *, prompt: bool) -> str:
        """Rendering with another text for message `place`."""
        message, refused = messages[place], ""
        # First without tool calls and thinking, so that they differ too; some templates require them.
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
    """Tokens of a rendered conversation, with their places in the text."""

    def __init__(self, tokenizer: Tokenizer, found: Answers) -> None:
        self._tokenizer, self._text, self._closing = tokenizer, found.text, found.closing.lstrip()
        self.tokens, self._places = tokenizer.encode_spans(found.text)
        self._stops = [end for _, end in self._places]

    def said(self, span: tuple[int, int]) -> tuple[int, int]:
        """[first, stop) of the tokens with a character in `span`, without end tokens."""
        start, end = span
        first = stop = bisect_right(self._stops, start)
        # A token of trimmed spaces has an empty span at its end.
        while stop < len(self.tokens) and (self._places[stop][0] < end or self._stops[stop] <= end):
            stop += 1
        while stop > first and self._closes(stop - 1):
            stop -= 1
        return first, stop

    def past_closing(self, stop: int) -> int:
        """Index after the end token, spaces before it included; `stop` if there is none."""
        for at in range(stop, len(self.tokens)):
            if self._closes(at):
                return at + 1
            if self._spelled(at):
                break
        return stop

    def _closes(self, at: int) -> bool:
        """True for an end token of the model, or a special token where the template closes the turn."""
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
    """Yield [start, end) of every run of True."""
    start = None
    for at, counts in enumerate([*mask, False]):
        if counts and start is None:
            start = at
        elif not counts and start is not None:
            yield start, at
            start = None
