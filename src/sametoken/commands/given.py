"""Prompts from the command line, a file or standard input, all checked before anything is loaded."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sametoken.errors import ConfigError
from sametoken.prompts.conversations import STDIN
from sametoken.prompts.files import read_items
from sametoken.prompts.sources import Source, as_turn, nonempty_text


def given_prompts(texts: Sequence[str], file: str | None, chat: bool) -> list[Source]:
    """Prompts of `--prompt` or of `--data`.

    Args:
        texts: values of `--prompt`; "-" is the whole standard input as one prompt.
        file: value of `--data`, see `first_turns`.
        chat: True if a text is the user's turn of a conversation.

    Raises:
        ConfigError: none or both were given. RequestError: a prompt is empty or a line is not a prompt.
    """
    if bool(texts) == (file is not None):
        raise ConfigError(
            f"got {'both --prompt and --data' if texts else 'no prompt'}; expected --prompt TEXT (repeatable), "
            "or --data FILE.jsonl; '-' is standard input for either"
        )
    if file is not None:
        if chat:
            raise ConfigError("--chat is for --prompt; in a file, write messages instead of prompt")
        return first_turns(file)
    for text in (found := [_standard_input() if text == STDIN else text for text in texts]):
        nonempty_text(text, "the prompt")
    return [as_turn(text) if chat else text for text in found]


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"--prompt -: byte {error.start} is not UTF-8; send the text as UTF-8") from error


def first_turns(file: str) -> list[Source]:
    """Prompts of `--data`: the first turn of each line; a message on standard error counts lines with later turns.

    Raises:
        ConfigError: the file is empty. DataError: it cannot be read. RequestError: a line is not a prompt.
    """
    _, items = read_items(file, "--data")
    if longer := sum(bool(item.later) for item in items):
        print(
            f"{file}: {longer} of {len(items)} prompts have more than one turn; only the first is asked",
            file=sys.stderr,
        )
    return [item.source for item in items]
