"""Rendering of conversations to prompt texts by the chat template of a checkpoint.

The texts equal those of `transformers.PreTrainedTokenizerBase.apply_chat_template`; transformers is not imported.
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
from sametoken.checkpoint.templating import END, START, ask
from sametoken.errors import CheckpointError, RequestError, shown
from sametoken.files import read_text

Templates = Mapping[str, str]  # by name; "default" is used, or "tool_use" if there is one and tools are given
Message = Mapping[str, Any]  # "role", "content" and further keys that the template reads
TRIED: tuple[Message, ...] = ({"role": "user", "content": "Hello there"},)
PRIVATE = (*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE))  # Unicode's code points for private use


def read_templates(directory: Path, tokenizer_config: Mapping[str, Any]) -> Templates:
    """Read the chat templates of a checkpoint: files next to the tokenizer, else the entry in tokenizer_config.json."""
    files = {"default": directory / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    found = {name: _read(file) for name, file in files.items() if file.is_file()}
    return found or named_templates(tokenizer_config.get("chat_template"))


def read_template(given: str) -> str:
    """Read a chat template, given as llama.cpp's name, as a file, or as a text, which has braces or blanks.

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
    _render_in_process(text, None, {})
    return text


def _read(file: Path) -> str:
    try:
        return read_text(file)
    except (OSError, ValueError) as error:  # not UTF-8, or not a name of a file
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"chat template {file}: {reason}; expected Jinja in UTF-8, a file or a text") from error


def named_templates(stated: object) -> Templates:
    """Chat templates of tokenizer_config.json, which states one text, several named texts or nothing.

    Raises:
        CheckpointError: `stated` has another form.
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
    """Rendered conversation.

    Attributes:
        text: prompt text.
        generated: [start, end) of each `{% generation %}` block in the text, in characters.
    """

    text: str
    generated: list[tuple[int, int]]


def render_marked(templates: Templates, messages: Sequence[Message], variables: Mapping[str, Any]) -> Marked:
    """Render a conversation as `render`, and find its `{% generation %}` blocks; most templates have none."""
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
    """Render a conversation up to the end of the last message's content, which the reply continues.

    Space at the end of that content stays if the template keeps it.

    Raises:
        RequestError: the last message has no text, or the template changes it; also as `render`.
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
    """Iterate over the characters for private use that are not in `text`."""
    return (sign for sign in map(chr, PRIVATE) if sign not in text)


def render(templates: Templates, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
    """Render a conversation to its prompt text.

    Args:
        templates: templates of `read_templates`.
        messages: messages of the conversation, oldest first.
        variables: further variables of the template: special tokens, add_generation_prompt, tools.

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
    return _render_in_process(chosen, messages, variables)


def _render_in_process(template: str, messages: Sequence[Message] | None, variables: Mapping[str, Any]) -> str:
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
    """Render a short conversation once with each template that is used; a template may refuse the conversation.

    Raises:
        CheckpointError: a template is not valid, or exceeds a limit of time, memory or length.
    """
    for name in ("default", "tool_use"):
        if name not in templates:
            continue
        try:
            kind, said = ask(templates[name], TRIED, variables)
        except OSError:  # no process can be started: an error of each conversation
            return
        if kind in (templating.INVALID, templating.COSTLY):
            words = "is not valid: " if kind == templating.INVALID else ""
            remedy = "correct it, or give another with chat_template"
            raise CheckpointError(f"the chat template {words}{said} (tried on {TRIED[0]['content']!r}); {remedy}")


def is_list(value: object) -> bool:
    """True for a sequence that is neither text nor bytes."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _choose(templates: Templates, with_tools: bool) -> str:
    if with_tools and "tool_use" in templates:
        return templates["tool_use"]
    if "default" in templates:
        return templates["default"]
    if templates:
        raise RequestError(f"the model has chat templates {', '.join(sorted(templates))} and none named default")
    raise RequestError("the model has no chat template; send a plain prompt, or put chat_template.jinja beside it")
