"""Renderer of chat templates, in child processes with limits.

A template is an untrusted program. Jinja's sandbox protects the objects of the interpreter, and the limits end a
template that runs too long. This module imports neither torch nor transformers, so that a process starts within 0.1 s.
"""

from __future__ import annotations

import json
import marshal
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from sametoken.limited import JobLimits, Limited

if TYPE_CHECKING:
    from jinja2 import Template

START, END = "_generation_start", "_generation_end"  # variables printed around `{% generation %}` blocks
TEMPLATE_SECONDS = 2.0  # CPU time for one conversation
MOST_MEMORY = 2**29  # bytes that a template may allocate
MOST_TEXT = 2**24  # characters of a rendered conversation
MOST_WAIT = 30.0  # seconds of wall-clock time for a reply, on a busy machine
LIMITS = JobLimits(TEMPLATE_SECONDS, MOST_MEMORY, MOST_WAIT)
TEXT, REFUSED, UNREADABLE, INVALID, COSTLY = "text", "refused", "unreadable", "invalid", "costly"
WORK = Limited(__name__, LIMITS)


class InvalidTemplateError(Exception):
    """Error of a template that does not compile."""


def ask(template: str, messages: Sequence[Mapping[str, Any]] | None, variables: Mapping[str, Any]) -> tuple[str, str]:
    """Render a conversation in a child process; return TEXT and the text, or another kind and the error message.

    Args:
        messages: None to only parse the template.

    Raises:
        OSError: no process could be started.
        RecursionError: the values nest too deeply.
    """
    given: Any = (template, messages, variables)
    try:
        job = marshal.dumps(given)
    except ValueError:  # types that only resemble those of JSON
        try:
            job = marshal.dumps((template, _plain(messages), _plain(variables)))
        except ValueError as error:
            raise RecursionError("it nests too deeply") from error
    said = WORK.reply(job)
    kind, words = (COSTLY, str(LIMITS)) if said is None else json.loads(said)
    return kind, words


def _plain(value: Any) -> Any:
    """Value in the types of JSON; other objects become text."""
    if value is None or type(value) in (str, int, float, bool, bytes):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(each) for key, each in value.items()}
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, str | bytes):
        return [_plain(each) for each in value]
    for kind in (str, bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    return str(value)


def begin() -> Callable[[bytes], bytes]:
    """Return the function that replies to jobs in a child process."""
    return _answer


def _answer(job: bytes) -> bytes:
    """Result of a job, as JSON: a kind, and the rendered text or an error message."""
    try:
        template, messages, variables = marshal.loads(job)
        kind, said = TEXT, "" if messages is None and compiled(template) else rendered(template, messages, variables)
        if len(said) > MOST_TEXT:
            kind, said = COSTLY, f"makes a text of more than {MOST_TEXT} characters"
        return json.dumps([kind, said]).encode()
    except MemoryError:  # ends the process, which may not release the memory of the job
        raise
    except InvalidTemplateError as error:
        return json.dumps([INVALID, str(error)[:1000]]).encode()
    except RecursionError:
        return json.dumps([UNREADABLE, "it nests too deeply"]).encode()
    except Exception as error:  # a template may raise any
        from jinja2 import TemplateError

        return json.dumps([REFUSED if isinstance(error, TemplateError) else UNREADABLE, str(error)[:1000]]).encode()


def rendered(template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """Render a conversation to text.

    Raises:
        InvalidTemplateError: the template is not valid.
        Exception: any error that the template raises.
    """
    present = [_present(message, template) for message in messages]
    return compiled(template).render({"tools": None, "documents": None, **variables, "messages": present})


def _present(message: Mapping[str, Any], template: str) -> dict[str, Any]:
    """Message without keys whose value is None, which templates would print.

    Clients send function calls with `"content": null`, an empty text or no content; templates expect a text or null.
    """
    present = {key: value for key, value in message.items() if value is not None}
    if present.get("tool_calls") and not present.get("content"):
        present["content"] = _content_of_calls(template)
    return present


@lru_cache(maxsize=16)
def _content_of_calls(template: str) -> str | None:
    """Content that a template expects in a message that only calls functions: "" or None.

    The result is the value with which the rendered call is shorter. (Templates that expect a text print null as None;
    DeepSeek-R1's prints an empty text as a separate answer.)
    """
    call = {"id": "0", "type": "function", "function": {"name": "f", "arguments": {}}}

    def shown(**said: Any) -> str | None:
        messages = [{"role": "user", "content": "u"}, {"role": "assistant", **said}]
        try:
            return compiled(template).render(messages=messages, tools=None)
        except MemoryError:
            raise
        except Exception:  # a template may raise any
            return None

    both = {content: shown(content=content, tool_calls=[call]) for content in ("", None)}
    lengths = {
        content: len(text) for content, text in both.items() if text is not None and text != shown(content=content)
    }
    return min(lengths, key=lengths.__getitem__, default="")


@lru_cache(maxsize=16)
def compiled(text: str) -> Template:
    """Compile a template in a sandbox, with the names that chat templates expect.

    Raises:
        InvalidTemplateError: the template is not valid; the message has the line of a syntax error.
    """
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import Name, Node, Output
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` blocks, which mark text of the assistant: START and END are printed around the body."""

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
        raise InvalidTemplateError(f"line {error.lineno}: {error}") from error
    except (RecursionError, MemoryError) as error:
        raise InvalidTemplateError("its parts nest too deeply, or it is too large") from error
    except Exception as error:  # Python does not compile Jinja's code
        raise InvalidTemplateError(str(error)) from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON of a value; Jinja's own filter escapes HTML characters, unlike the training texts of models."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
