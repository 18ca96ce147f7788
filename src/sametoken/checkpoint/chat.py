"""A conversation into the prompt text that a model was trained on, by the chat template of its checkpoint.

Renders as `transformers.PreTrainedTokenizerBase.apply_chat_template` does, without importing transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from sametoken.checkpoint import templating
from sametoken.checkpoint.template_names import TEMPLATES
from sametoken.checkpoint.template_process import ask
from sametoken.checkpoint.templating import END, START
from sametoken.errors import CheckpointError, RequestError, shown
from sametoken.files import read_text

Templates = Mapping[str, str]  # by name; the one that is used unless tools are given is "default"
Message = Mapping[str, Any]  # "role", "content" and whatever else the template reads
TRIED: tuple[Message, ...] = ({"role": "user", "content": "Hello there"},)
PRIVATE = (*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE))  # code points without a meaning of their own


def read_templates(directory: Path, tokenizer_config: Mapping[str, Any]) -> Templates:
    """The chat templates of a checkpoint: files beside the tokenizer, or else the entry in tokenizer_config.json."""
    files = {"default": directory / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    found = {name: _read(file) for name, file in files.items() if file.is_file()}
    return found or named_templates(tokenizer_config.get("chat_template"))


def read_template(given: str) -> str:
    """A chat template from a file, by llama.cpp's name for it, or from its text, which has braces or blanks.

    Raises:
        CheckpointError: the file cannot be read, or the template is not valid.
    """
    text = TEMPLATES.get(given, given)
    if (
        text is given
        and "{" not in given
        and (("\n" not in given and Path(given).is_file()) or " " not in given.strip())
    ):
        text = _read(Path(given))
    _asked(text, None, {})
    return text


def _read(file: Path) -> str:
    try:
        return read_text(file)
    except (OSError, ValueError) as error:  # no UTF-8, or no name of a file
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"chat template {file}: {reason}; expected Jinja in UTF-8, a file or a text") from error


def named_templates(stated: object) -> Templates:
    """The three forms of a template in tokenizer_config.json: one text, a list of named texts, or nothing.

    Raises:
        CheckpointError: it is none of them.
    """
    match stated:
        case None:
            return {}
        case str():
            return {"default": stated}
        case dict() if all(isinstance(text, str) for text in stated.values()):
            return stated
        case list() if all(
            isinstance(entry, dict) and all(isinstance(entry.get(key), str) for key in ("name", "template"))
            for entry in stated
        ):
            return {entry["name"]: entry["template"] for entry in stated}
    raise CheckpointError(
        f"chat_template in tokenizer_config.json is a {type(stated).__name__}, expected a text or a list of "
        '{"name": ..., "template": ...}; correct it, or add chat_template.jinja'
    )


class Marked(NamedTuple):
    """A rendered conversation and the [start, end) of every `{% generation %}` block in it, in characters."""

    text: str
    generated: list[tuple[int, int]]


def render_marked(templates: Templates, messages: Sequence[Message], variables: Mapping[str, Any]) -> Marked:
    """As `render`, with the places of what the template itself marks as generated; most templates mark nothing."""
    said = json.dumps([messages, variables], ensure_ascii=False, default=str)
    opening, closing = islice(unused_signs(said), 2)
    text = render(templates, messages, {**variables, START: opening, END: closing})
    pieces = re.split(f"([{opening}{closing}])", text)
    plain, generated, start = "", [], 0
    for piece in pieces:
        if piece == opening:
            start = len(plain)
        elif piece == closing:
            generated.append((start, len(plain)))
        else:
            plain += piece
    return Marked(plain, generated)


def render_open(templates: Templates, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
    """As `render`, up to the end of the last message's content: what a reply that continues it begins with.

    Space at the end of that content stays where the template keeps it.

    Raises:
        RequestError: the last message has no text, or the template does not show it.
    """
    content = messages[-1].get("content") if messages else None
    if not isinstance(content, str):
        raise RequestError("continue_final_message needs a last message with text as its content; got none")
    sign = next(unused_signs(json.dumps([messages, variables], ensure_ascii=False, default=str)))
    marked = [*messages[:-1], {**messages[-1], "content": f"{content}{sign} "}]
    text, closing, rest = render(templates, marked, variables).rpartition(sign)
    if not closing or content.strip() not in text:
        raise RequestError("continue_final_message: the chat template does not show the last message as it is")
    return text if rest.startswith(" ") else text.rstrip()


def unused_signs(text: str) -> Iterator[str]:
    """Characters for private use that `text` does not hold."""
    return (sign for sign in map(chr, PRIVATE) if sign not in text)


def render(templates: Templates, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
    """The prompt text of a conversation.

    Args:
        templates: from `read_templates`.
        messages: the conversation, oldest first.
        variables: what the template may read besides: special tokens, add_generation_prompt, tools.

    Raises:
        RequestError: there is no template or no message, or the template refuses the conversation.
        CheckpointError: the template itself is not valid.
    """
    if not is_list(messages):
        raise RequestError(f"a conversation is {shown(messages)}, expected a list of messages with role and content")
    if not messages:
        raise RequestError("the conversation is empty; give at least one message with role and content")
    if wrong := [message for message in messages if not isinstance(message, Mapping) or "role" not in message]:
        raise RequestError(f"a message is {shown(wrong[0])}, expected an object with role and content")
    chosen = _choose(templates, with_tools=variables.get("tools") is not None)
    return _asked(chosen, messages, variables)


def _asked(template: str, messages: Sequence[Message] | None, variables: Mapping[str, Any]) -> str:
    """Render a chat template for messages; with None, only parse the template and return ""."""
    try:
        kind, said = ask(template, messages, variables)
    except OSError as error:
        raise RequestError(
            f"no process could be started to render the conversation ({error.strerror})", advice="try again later"
        ) from error
    except RecursionError:
        kind, said = templating.UNREADABLE, "it nests too deeply"
    match kind:
        case templating.TEXT:
            return said
        case templating.INVALID:
            raise CheckpointError(f"the chat template is not valid: {said}; correct it")
        case templating.REFUSED:
            raise RequestError(f"the chat template refuses this conversation: {said}")
        case templating.COSTLY:
            raise RequestError(f"the chat template {said} for this conversation; shorten it, or use another template")
    raise RequestError(f"the chat template cannot read this conversation ({said}); check its messages")


def try_templates(templates: Templates, variables: Mapping[str, Any]) -> None:
    """Try the templates that conversations choose once; one may refuse the conversation, as some do.

    Raises:
        CheckpointError: a template is not valid, or takes too long or too much for two words.
    """
    for name in ("default", "tool_use"):
        if name not in templates:
            continue
        try:
            kind, said = ask(templates[name], TRIED, variables)
        except OSError:  # no process can be started: every conversation says so
            return
        if kind in (templating.INVALID, templating.COSTLY):
            words = "is not valid: " if kind == templating.INVALID else ""
            remedy = "correct it, or give another with chat_template"
            raise CheckpointError(f"the chat template {words}{said} (tried on {TRIED[0]['content']!r}); {remedy}")


def is_list(value: object) -> bool:
    """True for what callers may give where several of something are expected."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _choose(templates: Templates, with_tools: bool) -> str:
    if with_tools and "tool_use" in templates:
        return templates["tool_use"]
    if "default" in templates:
        return templates["default"]
    if templates:
        raise RequestError(f"the model has chat templates {', '.join(sorted(templates))} and none named default")
    raise RequestError("the model has no chat template; send a plain prompt, or put chat_template.jinja beside it")
