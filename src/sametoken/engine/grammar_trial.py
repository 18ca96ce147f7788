"""Trial compilation of a grammar in a child process with limits.

llguidance has limits for its lexer and its parser, but none for the work before them: a conjunction of patterns, which
a JSON schema states by `allOf`, by `$ref` with other keys or by `patternProperties`, is first searched for a text that
matches. The time and memory of the search grow exponentially with the number of patterns (20 patterns: 1.7 s, 230 MB),
in one call that no thread can end; a process can be ended. A grammar that passes the trial is compiled again in the
process that uses it.

This module imports neither torch nor pydantic, so that the process starts within 0.1 s.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from sametoken.engine.closed_objects import closed
from sametoken.engine.gbnf import lark_of_gbnf, states_gbnf
from sametoken.engine.structural_tag import JSON_FORM, lark_of
from sametoken.limited import JobLimits, Limited

# Limits of the work of one grammar, in llguidance's units, which are equal on every machine. The lexer's expressions
# bound the first mask to about 0.2 s and literals to 100 kB; its states, of 1 to 2 kB each, bound memory.
LLGUIDANCE = {
    "initial_lexer_fuel": 100_000, "step_lexer_fuel": 100_000, "step_max_items": 50_000, "max_items_in_row": 10_000,
    "max_lexer_states": 50_000,
}  # fmt: skip
# Bytes, allocated as they are used: llguidance follows rules by recursion, and a full stack ends the process.
STACK = 2**29
MOST_SECONDS = 1.2  # CPU time of a trial
MOST_MEMORY = 2**28  # bytes of a trial, beyond the stack and the interpreter
MOST_WAIT = 20.0  # seconds of wall-clock time, on a busy machine
SMALL = 2**10  # characters of a grammar as JSON that needs no trial, unless one of `CONJUNCTIONS` is in it
CONJUNCTIONS = ("allOf", "attern", "$ref", "oneOf", "not", "format", "if", "excludes", "&", "~", "%")
LIMITS = JobLimits(MOST_SECONDS, STACK + MOST_MEMORY, MOST_WAIT)
TOO_COSTLY = f"to compile the grammar takes more than {MOST_SECONDS:g} s or {MOST_MEMORY >> 20} MiB"
WORK = Limited(__name__, LIMITS)
STARTS = threading.Lock()  # held while the stack size, a setting of the process, is changed
T = TypeVar("T")


class NoStackError(Exception):
    """No memory for the stack of a thread."""


def needs_trial(spelled: str) -> bool:
    """True if the cost of a grammar, given as JSON, cannot be bounded before it is compiled."""
    return len(spelled) > SMALL or any(sign in spelled for sign in CONJUNCTIONS)


def source(matcher: Any, asked: Mapping[str, Any], special: Sequence[str]) -> str:
    """Grammar in llguidance's own notation.

    Args:
        matcher: llguidance's class `LLMatcher`.
        asked: fields of `StructuredOutputs`.
        special: texts of the model's special tokens.
    """
    if asked["json_object"]:
        made = matcher.grammar_from_json_schema({"type": "object"}, JSON_FORM)
    elif asked["json"] is not None:
        made = matcher.grammar_from_json_schema(json.dumps(closed(asked["json"])), JSON_FORM)
    elif asked["regex"] is not None:
        made = matcher.grammar_from_regex(asked["regex"])
    elif asked["choice"] is not None:
        made = matcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in asked["choice"]))
    elif asked["structural_tag"] is not None:
        made = matcher.grammar_from_lark(lark_of(asked["structural_tag"], special))
    else:
        stated = asked["grammar"]
        made = matcher.grammar_from_lark(lark_of_gbnf(stated) if states_gbnf(stated) else stated)
    return str(made)


def trial(spelled: str, special: Sequence[str], vocab_size: int) -> str | None:
    """Reason why a grammar cannot be compiled; None if it can.

    Args:
        spelled: fields of `StructuredOutputs`, as JSON.
        special: texts of the model's special tokens, which grammars may name.
        vocab_size: limit of token ids, which grammars may also name.

    Raises:
        OSError: the process could not be started.
    """
    named = [text for text in special if json.dumps(text)[1:-1] in spelled]
    given = json.dumps({"grammar": spelled, "special": named, "vocab_size": vocab_size if "<[" in spelled else 0})
    said = WORK.reply(given.encode())
    words: str | None = TOO_COSTLY if said is None else json.loads(said)
    return words


def begin() -> Callable[[bytes], bytes]:
    """Return the function of a child process that replies to a grammar with its error, or null."""
    import llguidance

    return lambda job: json.dumps(with_stack(lambda: _tried(llguidance, json.loads(job)))).encode()


def with_stack(work: Callable[[], T]) -> T:
    """Run `work` on a thread with a large stack; return its result or raise its error.

    Raises:
        NoStackError: there is no memory for the stack.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, name="sametoken-grammar", daemon=True)
    with STARTS:
        usual = threading.stack_size(STACK)
        try:
            thread.start()
        except RuntimeError as error:
            raise NoStackError from error
        finally:
            threading.stack_size(usual)
    return done.result()


def _tried(library: Any, given: Mapping[str, Any]) -> str | None:
    try:
        asked = json.loads(given["grammar"])
        tokens = _vocabulary(library, given["special"], given["vocab_size"])
        limits = library.LLParserLimits(verbose_errors=False, **LLGUIDANCE)
        matcher = library.LLMatcher(
            tokens, source(library.LLMatcher, asked, given["special"]), log_level=0, limits=limits
        )
        if not matcher.is_error():
            matcher.compute_bitmask()
            matcher.compute_ff_bytes()
    except (ValueError, RecursionError) as error:
        return str(error)
    return str(matcher.get_error()) or None


def _vocabulary(library: Any, special: Sequence[str], vocab_size: int) -> Any:
    """Vocabulary of single bytes, special tokens and ids in the grammar; other tokens hardly add cost."""
    words = _Bytes(special, vocab_size)
    return library.LLTokenizer(library.TokenizerWrapper(words), n_vocab=len(words.tokens))


class _Bytes:
    """Vocabulary in the interface of llguidance."""

    bos_token_id = None

    def __init__(self, special: Sequence[str], vocab_size: int) -> None:
        named = [b"<end>", *(text.encode() for text in special)]
        self.tokens = [bytes([byte]) for byte in range(256)] + named
        self.tokens += [b""] * (vocab_size - len(self.tokens))
        self.eos_token_id = 256
        self.special_token_ids = list(range(256, 256 + len(named)))

    def __call__(self, piece: bytes | str) -> list[int]:
        return list(piece.encode() if isinstance(piece, str) else piece)
