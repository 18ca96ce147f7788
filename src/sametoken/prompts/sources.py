"""Prompts: texts and conversations, built in or given, and their token ids.

The model's chat template turns a conversation into a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sametoken.errors import RequestError

if TYPE_CHECKING:
    from sametoken.checkpoint.tokenizer import Tokenizer

# Category and text: easy, hard and hopeless for drafters.
CATEGORISED = (
    ("chat", "Hi, can I get a latte with oat milk, please?"),
    ("chat", "I would like a large mocha with two shots and caramel syrup."),
    ("chat", "What is the difference between a cappuccino and a flat white?"),
    ("chat", "Hello, I want to book two tickets for a movie tonight."),
    ("chat", "Which comedies are playing near the station this evening?"),
    ("chat", "Hello! What do you like to do for fun?"),
    ("chat", "Nice to meet you. I love hiking and reading novels. And you?"),
    ("story", "Tell me a story."),
    ("story", "Tell me a story about a dog who wants to learn to swim."),
    ("prose", "Once upon a time, in a small house by the sea,"),
    ("prose", "The old man looked out of the window. The rain had not stopped for three days, and"),
    ("prose", "My sister has a red bicycle, my brother has a blue bicycle, and I have a"),
    ("repetition", "One, two, three, four, five, one, two, three, four, five, one, two, three,"),
    ("repetition", "row row row your boat, gently down the stream. row row row your boat, gently"),
    ("reasoning", "Question: What is two plus two? Answer: four. Question: What is three plus three? Answer:"),
    ("code", "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci("),
    ("code", "for name in names:\n    print(name)\nfor name in sorted(names):\n    print("),
    ("code", '{"name": "Ada", "age": 36}\n{"name": "Alan", "age": 41}\n{"name": "Grace", "age":'),
    ("prose", "Dear Sir or Madam, I am writing to complain about the train to the airport, which"),
    ("prose", "A recipe for pancakes: take two eggs, a cup of flour and"),
    ("odd", "Straße, naïve café, piñata: words with signs that English does not"),
    ("odd", "a"),
    ("odd", "?!?!?! ... --- ..."),
    ("repetition", "Please repeat after me: the quick brown fox jumps over the lazy dog. The quick brown fox"),
)
BUILT_IN = tuple(text for _, text in CATEGORISED)


class Conversation(NamedTuple):
    """Messages with role and content, oldest first."""

    messages: Sequence[dict[str, Any]]


Source = str | Conversation


class EncodedPrompt(NamedTuple):
    """Text of a prompt with its token ids."""

    text: str
    ids: list[int]


def encode_prompt(tokenizer: Tokenizer, source: Source) -> EncodedPrompt:
    """Encode a prompt with this tokenizer.

    Raises:
        RequestError: the prompt is a conversation, and the model has no chat template or the template rejects it.
    """
    if isinstance(source, Conversation):
        text = tokenizer.apply_chat_template(source.messages)
        return EncodedPrompt(text, tokenizer.encode(text, add_special_tokens=False))
    return EncodedPrompt(source, tokenizer.encode(source))


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str] = BUILT_IN) -> list[EncodedPrompt]:
    """Encode texts with this tokenizer, each as a user's turn if there is a chat template."""
    chat = tokenizer.has_chat_template
    return [encode_prompt(tokenizer, as_turn(text) if chat else text) for text in texts]


def as_turn(text: str) -> Conversation:
    """Conversation with `text` as the user's first turn."""
    return Conversation([{"role": "user", "content": text}])


def nonempty_text(text: object, name: str) -> str:
    """Return `text` if it is a nonempty string.

    Raises:
        RequestError: it is not; the message uses `name`.
    """
    if not isinstance(text, str) or not text:
        raise RequestError(f"{name} is {text!r}, expected a text that is not empty")
    return text
