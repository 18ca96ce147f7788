"""Renderer of chat templates, in a process of its own; see `template_process`.

A template is a program of a stranger. Jinja's sandbox keeps it from the interpreter's objects; it does not keep it from
running for ever, or from making a text that no memory holds, in one call that no thread can end. The kernel does.
This module imports neither torch nor transformers, so that the process begins within 0.1 s.
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
TEMPLATE_SECONDS = 2.0  # of processor time for one conversation
MOST_MEMORY = 2**29  # bytes that a template may take besides what the process has
MOST_TEXT = 2**24  # characters that a conversation may become
TEXT, REFUSED, UNREADABLE, INVALID, COSTLY = "text", "refused", "unreadable", "invalid", "costly"
HEADER = 8  # bytes before each message, which say its length


class InvalidTemplateError(Exception):
    """The template itself cannot be used."""


def main() -> None:
    """Answer jobs from standard input, one after the other, until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who reads the answers decides when this ends
    sys.stdout.flush()
    given, answers = sys.stdin.buffer, sys.stdout.buffer
    with open("/proc/self/statm", encoding="ascii") as stated:
        most = int(stated.read().split()[0]) * resource.getpagesize() + MOST_MEMORY
    for limit, value in ((resource.RLIMIT_AS, most), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0)):
        resource.setrlimit(limit, (value, value))
    while (job := _received(given)) is not None:
        # Processor time, not the time on the clock: a busy machine refuses the same templates as an idle one. The
        # signal's own effect is to end the process.
        signal.setitimer(signal.ITIMER_PROF, TEMPLATE_SECONDS)
        answer = _answer(job)
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(len(answer).to_bytes(HEADER, "little") + answer)
        answers.flush()


def _received(given: BinaryIO) -> bytes | None:
    size = given.read(HEADER)
    return given.read(int.from_bytes(size, "little")) if len(size) == HEADER else None


def _answer(job: bytes) -> bytes:
    """Result of a job, as JSON: a kind, and the rendered text or the words of an error."""
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
    except Exception as error:  # templates raise whatever they like
        from jinja2 import TemplateError

        return json.dumps([REFUSED if isinstance(error, TemplateError) else UNREADABLE, str(error)[:1000]]).encode()


def rendered(template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """The text of a conversation.

    Raises:
        InvalidTemplateError: the template is not valid.
        Exception: whatever the template raises.
    """
    present = [_present(message, template) for message in messages]
    return compiled(template).render({"tools": None, "documents": None, **variables, "messages": present})


def _present(message: Mapping[str, Any], template: str) -> dict[str, Any]:
    """A message without keys that hold nothing, which templates would print as None.

    Clients send calls of functions with `"content": null`, an empty one or none; templates expect a text or null there.
    """
    present = {key: value for key, value in message.items() if value is not None}
    if present.get("tool_calls") and not present.get("content"):
        present["content"] = _content_of_calls(template)
    return present


@lru_cache(maxsize=16)
def _content_of_calls(template: str) -> str | None:
    """Content that a template expects in a message that only calls functions.

    An empty text or null: the one with which the template shows a call in the shorter text. (Templates that expect a
    text print null as None; DeepSeek-R1's prints an empty text as an answer of its own.)
    """
    call = {"id": "0", "type": "function", "function": {"name": "f", "arguments": {}}}

    def shown(**said: Any) -> str | None:
        messages = [{"role": "user", "content": "u"}, {"role": "assistant", **said}]
        try:
            return compiled(template).render(messages=messages, tools=None)
        except MemoryError:
            raise
        except Exception:  # templates raise whatever they like
            return None

    both = {content: shown(content=content, tool_calls=[call]) for content in ("", None)}
    lengths = {
        content: len(text) for content, text in both.items() if text is not None and text != shown(content=content)
    }
    return min(lengths, key=lengths.__getitem__, default="")


@lru_cache(maxsize=16)
def compiled(text: str) -> Template:
    """A template in a sandbox, with the names that chat templates expect.

    Raises:
        InvalidTemplateError: with the line at fault, where that is known.
    """
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
        raise InvalidTemplateError(f"line {error.lineno}: {error}") from error
    except (RecursionError, MemoryError) as error:
        raise InvalidTemplateError("its parts nest too deeply, or it is too large") from error
    except Exception as error:  # Python refuses what Jinja made of it
        raise InvalidTemplateError(str(error)) from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML signs, which models never saw."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment_of_child() -> dict[str, str]:
    """Variables that the process needs; keys and tokens are none of them."""
    names = ("TZ", "LANG", "LC_ALL", "LC_TIME", "PATH", "LD_LIBRARY_PATH", "PYTHONHOME")
    return {name: os.environ[name] for name in names if name in os.environ}
