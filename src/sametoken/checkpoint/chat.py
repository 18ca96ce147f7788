"""A conversation into the prompt text that a model was trained on, by the chat template of its checkpoint.

Renders as `transformers.PreTrainedTokenizerBase.apply_chat_template` does, without importing transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sametoken.errors import CheckpointError, RequestError, shown

if TYPE_CHECKING:
    from jinja2 import Template

Templates = Mapping[str, str]  # by name; the one that is used unless tools are given is "default"
Message = Mapping[str, Any]  # "role", "content" and whatever else the template reads
START, END = "_generation_start", "_generation_end"  # variables printed around `{% generation %}` blocks
PRIVATE = (*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE))  # code points without a meaning of their own


def read_templates(directory: Path, tokenizer_config: Mapping[str, Any]) -> Templates:
    """The chat templates of a checkpoint: files beside the tokenizer, or else the entry in tokenizer_config.json."""
    files = {"default": directory / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    found = {name: _read(file) for name, file in files.items() if file.is_file()}
    return found or named_templates(tokenizer_config.get("chat_template"))


def read_template(given: str) -> str:
    """A chat template from a file, or from its text: no file's name has the braces that every template needs.

    Raises:
        CheckpointError: the file cannot be read, or the template is not valid.
    """
    text = given
    if "{" not in given:
        text = _read(Path(given))
    _compile(text)
    return text


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
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
    from jinja2 import TemplateError

    if not is_list(messages):
        raise RequestError(f"a conversation is {shown(messages)}, expected a list of messages with role and content")
    if not messages:
        raise RequestError("the conversation is empty; give at least one message with role and content")
    if wrong := [message for message in messages if not isinstance(message, Mapping) or "role" not in message]:
        raise RequestError(f"a message is {shown(wrong[0])}, expected an object with role and content")
    chosen = _choose(templates, with_tools=variables.get("tools") is not None)
    template, present = _compile(chosen), [_present(message, chosen) for message in messages]
    try:
        return template.render({"tools": None, "documents": None, **variables, "messages": present})
    except TemplateError as error:
        raise RequestError(f"the chat template refuses this conversation: {error}") from error
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise RequestError(f"the chat template cannot read this conversation ({error}); check its messages") from error


def _present(message: Message, template: str) -> dict[str, Any]:
    """A message without keys that hold nothing, which templates would print as None.

    Clients send calls of functions with `"content": null`, an empty one or none; templates expect a text or null there.
    """
    present = {key: value for key, value in message.items() if value is not None}
    if present.get("tool_calls") and not present.get("content"):
        present["content"] = _content_of_calls(template)
    return present


@lru_cache(maxsize=16)
def _content_of_calls(template: str) -> str | None:
    """What a template expects as the content of a message that only calls functions.

    An empty text or null: the one with which the template shows a call in the shorter text. (Templates that expect a
    text print null as None; DeepSeek-R1's prints an empty text as an answer of its own.)
    """
    call = {"id": "0", "type": "function", "function": {"name": "f", "arguments": {}}}

    def rendered(**said: Any) -> str | None:
        messages = [{"role": "user", "content": "u"}, {"role": "assistant", **said}]
        try:
            return _compile(template).render(messages=messages, tools=None)
        except Exception:  # templates raise whatever they like
            return None

    shown = {content: rendered(content=content, tool_calls=[call]) for content in ("", None)}
    lengths = {
        content: len(text) for content, text in shown.items() if text is not None and text != rendered(content=content)
    }
    return min(lengths, key=lengths.__getitem__, default="")


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


@lru_cache(maxsize=16)
def _compile(text: str) -> Template:
    """A template in a sandbox, since it comes from outside, with the names that chat templates expect."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import Name, Node, Output
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what the assistant said, for training; unless asked for, only its body shows."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> list[Node]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            start, end = (Output([Name(name, "load")], lineno=line) for name in (START, END))
            return [start, *body, end]

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(f"the chat template is not valid: line {error.lineno}: {error}; correct it") from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML signs, which models never saw."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
