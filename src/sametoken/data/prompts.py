"""Prompts: texts and conversations, from files of JSON lines or built in, and as the token ids that a model reads.

A conversation becomes a text through the model's chat template.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sametoken.checkpoint.paths import user_path
from sametoken.errors import ConfigError, RequestError, unknown_name

if TYPE_CHECKING:
    from sametoken.engine.llm import LLM

STDIN = "-"
KEYS = ("messages", "prompt")

# Category and text: what drafters find easy, hard and hopeless.
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


class Spelled(NamedTuple):
    """A prompt as the model reads it: its text, and the token ids of that text."""

    text: str
    ids: list[int]


def spell(llm: LLM, source: Source) -> Spelled:
    """A prompt for this model."""
    if isinstance(source, Conversation):
        text = llm.tokenizer.apply_chat_template(source.messages)
        return Spelled(text, llm.tokenizer.encode(text, add_special_tokens=False))
    return Spelled(source, llm.tokenizer.encode(source))


def as_turn(text: str) -> Conversation:
    """A text as the user's first turn."""
    return Conversation([{"role": "user", "content": text}])


def read_prompts(file: str) -> list[Source]:
    """The prompts of a file of JSON lines, each with `prompt` or `messages`; "-" is standard input.

    Raises:
        ConfigError: the file cannot be read or is empty. RequestError: a line is not a prompt, with its number.
    """
    return [parse_prompt(entry, where) for where, entry in read_entries(file, "--prompts")]


def read_entries(file: str, option: str) -> list[tuple[str, dict[str, Any]]]:
    """The objects of a file of JSON lines, each after the words that say where it stands; "-" is standard input.

    Args:
        option: which named the file, for messages.

    Raises:
        ConfigError: the file cannot be read or is empty. RequestError: a line is not a JSON object, with its number.
    """
    try:
        content = sys.stdin.read() if file == STDIN else user_path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {file}: {error.strerror}; expected a readable file of JSON lines") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{option} {file}: byte {error.start} is not UTF-8; save the file as UTF-8") from error
    # Not splitlines: a JSON string may hold U+2028, which that would cut at.
    lines = [(f"{file}, line {number}", line) for number, line in enumerate(content.split("\n"), 1) if line.strip()]
    if not lines:
        raise ConfigError(f"{option} {file} is empty; expected one JSON object per line with prompt or messages")
    return [(where, _parse_object(line, where)) for where, line in lines]


def _parse_object(line: str, where: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where} is not JSON ({error}); expected an object with prompt or messages") from error
    if not isinstance(entry, dict):
        raise RequestError(f"{where}: got {line.strip()[:80]}, expected an object with either prompt or messages")
    return entry


def parse_prompt(entry: dict[str, Any], where: str) -> Source:
    """The prompt of an object with `prompt` or `messages`.

    Raises:
        RequestError: it has neither, both or other keys, or the value is no prompt.
    """
    if len(entry.keys() & set(KEYS)) != 1:
        raise RequestError(f"{where}: got {str(entry)[:80]}, expected an object with either prompt or messages")
    if unknown := sorted(entry.keys() - set(KEYS)):
        raise RequestError(f"{where}: {unknown_name('key', unknown[0], KEYS)}")
    if "prompt" in entry:
        return check_text(entry["prompt"], f"{where}: prompt")
    messages = entry["messages"]
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise RequestError(f"{where}: messages must be a list of at least one object with role and content")
    return Conversation(messages)


def check_text(text: object, name: str) -> str:
    """The text, unless it is none or empty.

    Raises:
        RequestError: names it as `name`.
    """
    if not isinstance(text, str) or not text:
        raise RequestError(f"{name} is {text!r}, expected a text that is not empty")
    return text
