"""Renderer of chat templates, in a child process; see `template_process`.

A template is an untrusted program. Jinja's sandbox protects the objects of the interpreter, but a template may still
run forever, or build a text larger than the memory, in one call that no thread can end. Limits of the kernel end it.
This module imports neither torch nor transformers, so that the process starts within 0.1 s.
"""

from __future__ import annotations

import json
import marshal
import os
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from jinja2 import Template

START, END = "_generation_start", "_generation_end"  # variables printed around `{% generation %}` blocks
TEMPLATE_SECONDS = 2.0  # CPU time for one conversation
MOST_MEMORY = 2**29  # bytes that a template may allocate
MOST_TEXT = 2**24  # characters of a rendered conversation
TEXT, REFUSED, UNREADABLE, INVALID, COSTLY = "text", "refused", "unreadable", "invalid", "costly"
HEADER = 8  # bytes of the length before each message


class InvalidTemplateError(Exception):
    """Error of a template that does not compile."""


def main() -> None:
    """Reply to jobs from standard input, one after the other, until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when this process ends
    sys.stdout.flush()
    given, answers = sys.stdin.buffer, sys.stdout.buffer
    with open("/proc/self/statm", encoding="ascii") as stated:
        most = int(stated.read().split()[0]) * resource.getpagesize() + MOST_MEMORY
    for limit, value in ((resource.RLIMIT_AS, most), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0)):
        resource.setrlimit(limit, (value, value))
    while (job := _received(given)) is not None:
        # CPU time, not wall-clock time: a busy machine refuses the same templates as an idle one. The default action
        # of the signal is to end the process.
        signal.setitimer(signal.ITIMER_PROF, TEMPLATE_SECONDS)
        answer = _answer(job)
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(len(answer).to_bytes(HEADER, "little") + answer)
        answers.flush()


def _received(given: BinaryIO) -> bytes | None:
    size = given.read(HEADER)
    return given.read(int.from_bytes(size, "little")) if len(size) == HEADER else None


def _answer(job: bytes) -> bytes:
    """Result of a job, as JSON: a kind, and the rendered text or an error message."""
    try:
        template, messages, variables = marshal.loads(job)
        kind, said = TEXT, "" if messages is None and compiled(template) else rendered(template, messages, variables)
        if len(said) > MOST_TEXT:
            kind, said = COSTLY, f"makes a text of more than {MOST_TEXT} characters"
        return json.dumps([kind, said]).encode()
    except MemoryError:
        return json.dumps([COSTLY, f"takes more than {MOST_MEMORY >> 20} MiB"]).encode()
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


def environment_of_child() -> dict[str, str]:
    """Environment variables that the child needs, without API keys and tokens."""
    names = ("TZ", "LANG", "LC_ALL", "LC_TIME", "PATH", "LD_LIBRARY_PATH", "PYTHONHOME")
    return {name: os.environ[name] for name in names if name in os.environ}
