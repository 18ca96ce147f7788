"""Every error a user can meet, as one tree. A message says what was got, what was expected and what to do.

What programs need of a message is data of the error (`field`, `problem`, `advice`); nobody searches in its text.

SametokenError
├── ConfigError              an option or configuration key is unknown or has a bad value (also a ValueError)
├── RequestError             a prompt or sampling parameter cannot be served (also a ValueError)
│   └── PromptTooLongError   the prompt does not fit the context
├── DataError                a file of conversations or prepared samples is unreadable or not what it should be
├── HubError                 a model id could not be resolved or downloaded
├── CheckpointError          files are missing, unreadable, incomplete or not what they claim to be
│   └── UnsupportedModelError  the architecture, rotary variant or format is not one we implement
├── DraftMismatchError       the draft does not fit the target (vocabulary, special tokens, shapes)
├── EngineError              the engine met an error of its own under requests that it had taken
├── ModelOutputError         the model's scores are not numbers, so that no token can be drawn
├── MemoryPlanError          weights, cache and lookahead do not fit the memory that was given
└── LosslessnessError        speculative and plain output differ: a bug, never bad luck
"""

from __future__ import annotations

import copy
import difflib
import re
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any, Self

NO_WINDOWS = "Windows is not supported; run sametoken in WSL 2, the Windows Subsystem for Linux"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # what a file holds may be a terminal's commands
SHOULD_BE = "Input should be "  # how pydantic begins what it expects of a value
LONGEST_MESSAGE = 2000  # characters of a message; what it quotes of a file may be of any length


class SametokenError(Exception):
    """Root of the tree; the command line turns it into one line and exit code 2.

    Args:
        problem: what was got and what was expected; where there is no field, this may be the whole message.
        field: the name of what is at fault: a parameter, a key or a file; "" for none. It begins the message.
        place: where in the field, as the message has it after the name, for example ".method" or "[3]".
        advice: what to do, which ends the message; "" where `problem` says it.
    """

    def __init__(self, problem: str = "", *, field: str = "", place: str = "", advice: str = "") -> None:
        super().__init__(problem)
        self.problem, self.field, self.place, self.advice = problem, field, place, advice

    def about(self, field: str) -> Self:
        """Copy of the error about a field of another name; if this one has no field, the name is put before its
        text.
        """
        renamed = copy.copy(self)
        renamed.field = field
        return renamed

    def __str__(self) -> str:
        """The message as any terminal can print it: at most LONGEST_MESSAGE, control characters and such escaped."""
        text = f"{self.field}{self.place}: {self.problem}" if self.field else self.problem
        text += f"; {self.advice}" if self.advice else ""
        if len(text) > LONGEST_MESSAGE:
            text = f"{text[: LONGEST_MESSAGE // 2]} [...] {text[-LONGEST_MESSAGE // 2 :]}"
        text = CONTROL.sub(lambda found: repr(found[0])[1:-1], text)
        return text.encode(errors="backslashreplace").decode()


class ConfigError(SametokenError, ValueError):
    """An option or configuration key is unknown or has a bad value."""


class RequestError(SametokenError, ValueError):
    """A prompt or sampling parameter cannot be served."""


class PromptTooLongError(RequestError):
    """The prompt does not fit the context.

    Attributes:
        tokens: of the prompt. `context`: tokens that the context holds.
    """

    tokens = 0
    context = 0

    @classmethod
    def of(cls, tokens: int, context: int, remedy: str, *, at_least: bool = False) -> Self:
        """The error for a prompt of a request; `remedy` is what else helps."""
        size = f"at least {tokens}" if at_least else f"{tokens}"
        error = cls(
            f"the prompt has {size} tokens, the context holds {context} with at least one of output",
            field="prompt",
            advice=f"shorten the prompt or {remedy}",
        )
        error.tokens, error.context = tokens, context
        return error


class DataError(SametokenError):
    """A file of conversations or prepared samples is unreadable or not what it should be."""


class HubError(SametokenError):
    """A model id could not be resolved or downloaded."""


class CheckpointError(SametokenError):
    """Files are missing, unreadable, incomplete or not what they claim to be."""


class UnsupportedModelError(CheckpointError):
    """The architecture, rotary variant or format is not implemented here."""


class DraftMismatchError(SametokenError):
    """The draft does not fit the target."""


class EngineError(SametokenError):
    """The engine met an error of its own under requests that it had taken."""


class ModelOutputError(SametokenError):
    """The model's scores are not numbers, so that no token can be drawn."""


class MemoryPlanError(SametokenError):
    """Weights, cache and lookahead do not fit the memory that was given."""


class LosslessnessError(SametokenError):
    """Speculative and plain output differ."""


def not_finite() -> ModelOutputError:
    """Scores of the target that are NaN or infinite."""
    return ModelOutputError(
        "the model's scores for this sequence are not finite numbers; its weights or this dtype do not suit each other"
    )


def memory_ran_out(error: BaseException) -> bool:
    """True if an error means that host or device memory is exhausted; torch raises RuntimeError for both."""
    words = str(error).lower()
    said = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, MemoryError) or any(each in words for each in said)


def found_wrong(problem: Mapping[str, Any]) -> str:
    """Expected value, from an entry of `ValidationError.errors()`: our validator's words, or pydantic's.

    Pydantic's text of an error that one of our validators raised has a heading before our words.
    """
    own = problem.get("ctx", {}).get("error")
    if isinstance(own, ValueError):
        return str(own)
    expected = str(problem["msg"]).removeprefix(SHOULD_BE)
    if expected == problem["msg"]:
        return expected
    return f"expected {'a value ' if expected.startswith(('greater ', 'less ')) else ''}{expected}"


def unknown_name(kind: str, got: str, known: Iterable[str], others: Iterable[str] = ()) -> str:
    """Words for an unknown option, with the nearest valid name first.

    Args:
        kind: what was being named, for example "sampling parameter".
        got: the name as the user wrote it.
        known: all valid names.
        others: further valid names, of a peer: too many to list.
    """
    names = sorted(known)
    close = difflib.get_close_matches(got, [*names, *others], n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"unknown {kind} {got!r}: {hint}valid: {', '.join(names)}"


_SHOWN = reprlib.Repr()
_SHOWN.maxlevel, _SHOWN.maxlist, _SHOWN.maxdict, _SHOWN.maxstring, _SHOWN.maxlong, _SHOWN.maxother = 3, 6, 6, 80, 40, 80


def shown(value: object) -> str:
    """A value of a file or a caller in an error: its repr, of which large and deep parts are left out."""
    return _SHOWN.repr(value)
