"""All errors that users can meet, as one tree. A message has the actual value, the expected one and a remedy.

Programs read the parts of a message from the error (`field`, `problem`, `advice`) and never parse its text.

SametokenError
├── ConfigError              an option or configuration key is unknown or has a bad value (also a ValueError)
├── RequestError             a prompt or sampling parameter cannot be served (also a ValueError)
│   └── PromptTooLongError   the prompt does not fit the context
├── DataError                a file of conversations or prepared samples is unreadable or invalid
├── HubError                 a model id could not be resolved or downloaded
├── CheckpointError          files are missing, unreadable, incomplete or invalid
│   └── UnsupportedModelError  the architecture, rotary variant or format is not one we implement
├── DraftMismatchError       the draft does not fit the target (vocabulary, special tokens, shapes)
├── EngineError              the engine failed while it processed accepted requests
├── ModelOutputError         the model's logits are not finite, so that no token can be drawn
├── MemoryPlanError          weights, cache and lookahead do not fit the memory that was given
└── LosslessnessError        speculative and plain output differ: always a bug
"""

from __future__ import annotations

import copy
import difflib
import re
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any, Self

NO_WINDOWS = "Windows is not supported; run sametoken in WSL 2, the Windows Subsystem for Linux"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # the content of a file may contain commands for a terminal
SHOULD_BE = "Input should be "  # beginnings of pydantic's expectations
LONGEST_MESSAGE = 2000  # characters of a message; quotations from a file may be of any length


class SametokenError(Exception):
    """Root of the tree; the command line prints it as one line and exits with code 2.

    Args:
        problem: actual and expected value; without a field, this may be the whole message.
        field: parameter, key or file at fault, which begins the message; "" for none.
        place: place within the field, which follows its name in the message, for example ".method" or "[3]".
        advice: remedy, which ends the message; "" if `problem` includes it.
    """

    def __init__(self, problem: str = "", *, field: str = "", place: str = "", advice: str = "") -> None:
        super().__init__(problem)
        self.problem, self.field, self.place, self.advice = problem, field, place, advice

    def about(self, field: str) -> Self:
        """Copy of the error with another field name; if the error has no field, the name precedes its text."""
        renamed = copy.copy(self)
        renamed.field = field
        return renamed

    def __str__(self) -> str:
        """Message that is safe to print: at most LONGEST_MESSAGE characters, with control characters escaped."""
        text = f"{self.field}{self.place}: {self.problem}" if self.field else self.problem
        text += f"; {self.advice}" if self.advice else ""
        if len(text) > LONGEST_MESSAGE:
            text = f"{text[: LONGEST_MESSAGE // 2]} [...] {text[-LONGEST_MESSAGE // 2 :]}"
        text = CONTROL.sub(lambda found: repr(found[0])[1:-1], text)
        return text.encode(errors="backslashreplace").decode()


class ConfigError(SametokenError, ValueError):
    """Error: an option or configuration key is unknown or has a bad value."""


class RequestError(SametokenError, ValueError):
    """Error: a prompt or sampling parameter cannot be served."""


class PromptTooLongError(RequestError):
    """Error: the prompt does not fit the context.

    Attributes:
        tokens: length of the prompt.
        context: length of the context.
    """

    tokens = 0
    context = 0

    @classmethod
    def of(cls, tokens: int, context: int, remedy: str, *, at_least: bool = False) -> Self:
        """Error about the prompt of a request; `remedy` is further advice."""
        size = f"at least {tokens}" if at_least else f"{tokens}"
        error = cls(
            f"the prompt has {size} tokens, the context holds {context} with at least one of output",
            field="prompt",
            advice=f"shorten the prompt or {remedy}",
        )
        error.tokens, error.context = tokens, context
        return error


class DataError(SametokenError):
    """Error: a file of conversations or prepared samples is unreadable or invalid."""


class HubError(SametokenError):
    """Error: a model id could not be resolved or downloaded."""


class CheckpointError(SametokenError):
    """Error: files are missing, unreadable, incomplete or invalid."""


class UnsupportedModelError(CheckpointError):
    """Error: the architecture, RoPE variant or format is not implemented."""


class DraftMismatchError(SametokenError):
    """Error: the draft does not fit the target."""


class EngineError(SametokenError):
    """Error: the engine failed while it processed accepted requests."""


class ModelOutputError(SametokenError):
    """Error: the model's logits are not finite, so that no token can be drawn."""


class MemoryPlanError(SametokenError):
    """Error: weights, cache and lookahead do not fit the given memory."""


class LosslessnessError(SametokenError):
    """Error: speculative and plain output differ."""


def not_finite() -> ModelOutputError:
    """Error about logits of the target that are NaN or infinite."""
    return ModelOutputError(
        "the model's scores for this sequence are not finite numbers; its weights or this dtype do not suit each other"
    )


def memory_ran_out(error: BaseException) -> bool:
    """True if an error means that host or device memory is exhausted; torch raises RuntimeError for both."""
    words = str(error).lower()
    said = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, MemoryError) or any(each in words for each in said)


def found_wrong(problem: Mapping[str, Any]) -> str:
    """Expected value in words, from an entry of `ValidationError.errors()`.

    For errors of our own validators, the heading that pydantic puts before the message is removed.
    """
    own = problem.get("ctx", {}).get("error")
    if isinstance(own, ValueError):
        return str(own)
    expected = str(problem["msg"]).removeprefix(SHOULD_BE)
    if expected == problem["msg"]:
        return expected
    return f"expected {'a value ' if expected.startswith(('greater ', 'less ')) else ''}{expected}"


def unknown_name(kind: str, got: str, known: Iterable[str], others: Iterable[str] = ()) -> str:
    """Message about an unknown name, with the nearest valid name first.

    Args:
        kind: kind of the name, for example "sampling parameter".
        got: name that the user wrote.
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
    """Text of a value for an error message: its repr, with large and deep parts left out."""
    return _SHOWN.repr(value)
