"""Prompts from the command line, a file or standard input, all checked before anything is loaded.

A prompt is a text, or a conversation that the model's chat template turns into one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from foretoken.errors import ConfigError, RequestError, unknown_name

if TYPE_CHECKING:
    from foretoken.engine.llm import LLM

STDIN = "-"
KEYS = ("messages", "prompt")

# Chat turns, prose, code and repetition: what drafters find easy, hard and hopeless.
BUILT_IN = (
    "Hi, can I get a latte with oat milk, please?",
    "I would like a large mocha with two shots and caramel syrup.",
    "What is the difference between a cappuccino and a flat white?",
    "Hello, I want to book two tickets for a movie tonight.",
    "Which comedies are playing near the station this evening?",
    "Hello! What do you like to do for fun?",
    "Nice to meet you. I love hiking and reading novels. And you?",
    "Tell me a story.",
    "Tell me a story about a dog who wants to learn to swim.",
    "Once upon a time, in a small house by the sea,",
    "The old man looked out of the window. The rain had not stopped for three days, and",
    "My sister has a red bicycle, my brother has a blue bicycle, and I have a",
    "One, two, three, four, five, one, two, three, four, five, one, two, three,",
    "row row row your boat, gently down the stream. row row row your boat, gently",
    "Question: What is two plus two? Answer: four. Question: What is three plus three? Answer:",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(",
    "for name in names:\n    print(name)\nfor name in sorted(names):\n    print(",
    '{"name": "Ada", "age": 36}\n{"name": "Alan", "age": 41}\n{"name": "Grace", "age":',
    "Dear Sir or Madam, I am writing to complain about the train to the airport, which",
    "A recipe for pancakes: take two eggs, a cup of flour and",
    "Straße, naïve café, piñata: words with signs that English does not",
    "a",
    "?!?!?! ... --- ...",
    "Please repeat after me: the quick brown fox jumps over the lazy dog. The quick brown fox",
)


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


def given_prompts(texts: Sequence[str], file: str | None, chat: bool) -> list[Source]:
    """The prompts of `--prompt` or `--prompts`, whichever was given.

    Args:
        texts: `--prompt`, each a prompt; "-" is all of standard input as one.
        file: `--prompts`, see `read_prompts`.
        chat: take texts as the user's turn of a conversation.

    Raises:
        ConfigError: none or both were given. RequestError: a prompt is empty or a line is not a prompt.
    """
    if bool(texts) == (file is not None):
        raise ConfigError(
            f"got {'both --prompt and --prompts' if texts else 'no prompt'}; expected --prompt TEXT (repeatable), "
            "or --prompts FILE.jsonl; '-' is standard input for either"
        )
    if file is not None:
        if chat:
            raise ConfigError("--chat goes with --prompt; in a file, write messages instead of prompt")
        return read_prompts(file)
    for text in (found := [sys.stdin.read() if text == STDIN else text for text in texts]):
        _check_text(text, "the prompt")
    return [as_turn(text) if chat else text for text in found]


def read_prompts(file: str) -> list[Source]:
    """The prompts of a file of JSON lines, each with `prompt` or `messages`; "-" is standard input.

    Raises:
        ConfigError: the file cannot be read or is empty. RequestError: a line is not a prompt, with its number.
    """
    try:
        content = sys.stdin.read() if file == STDIN else Path(file).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--prompts {file}: {error.strerror}; expected a readable file of JSON lines") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--prompts {file}: byte {error.start} is not UTF-8; save the file as UTF-8") from error
    # Not splitlines: a JSON string may hold U+2028, which that would cut at.
    lines = [(number, line) for number, line in enumerate(content.split("\n"), 1) if line.strip()]
    if not lines:
        raise ConfigError(f"--prompts {file} is empty; expected one JSON object per line with prompt or messages")
    return [_parse(line, f"{file}, line {number}") for number, line in lines]


def _parse(line: str, where: str) -> Source:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise RequestError(f"{where} is not JSON ({error}); expected an object with prompt or messages") from error
    if not isinstance(entry, dict) or len(entry.keys() & set(KEYS)) != 1:
        raise RequestError(f"{where}: got {line.strip()[:80]}, expected an object with either prompt or messages")
    if unknown := sorted(entry.keys() - set(KEYS)):
        raise RequestError(f"{where}: {unknown_name('key', unknown[0], KEYS)}")
    if "prompt" in entry:
        return _check_text(entry["prompt"], f"{where}: prompt")
    messages = entry["messages"]
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise RequestError(f"{where}: messages must be a list of at least one object with role and content")
    return Conversation(messages)


def _check_text(text: object, name: str) -> str:
    if not isinstance(text, str) or not text:
        raise RequestError(f"{name} is {text!r}, expected a text that is not empty")
    return text
