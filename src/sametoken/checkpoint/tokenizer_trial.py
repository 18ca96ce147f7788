"""Limits on the cost of a tokenizer, and trials of rules of unknown cost in a process with limits.

tokenizer.json is an untrusted file. It may hold expressions that take hours for a line of text, replacements that make
gigabytes of a word, and tables that the library reads beyond their end, all in one call that no thread can end. The
growth of a text follows from the rules. The cost of an expression is measured: the process splits each text before the
tokenizer does. Expressions of published models are harmless and are not tried. This module imports neither torch nor
transformers, so that the process starts within 0.1 s.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from sametoken.checkpoint.gguf.splitting import SPLITS
from sametoken.errors import RequestError
from sametoken.limited import JobLimits, Limited

TRIAL_SECONDS = 5  # CPU time for the texts of one trial
TRIAL_MEMORY = 2**31  # bytes that a trial may allocate
MOST_WAIT = 60.0  # seconds of wall-clock time, on a busy machine
LIMITS = JobLimits(TRIAL_SECONDS, TRIAL_MEMORY, MOST_WAIT)
MOST_TEXT = 2**22  # bytes of the text of a request: a million tokens of English, about 5 s and 0.5 GB
USUAL_GROWTH = 16  # bytes that a normaliser makes of one at MOST_TEXT; more lowers the limit of texts
MOST_GROWTH = 256  # bytes that rules may make of one
PARTS = ("normalizer", "pre_tokenizer", "decoder")
# Expressions whose time grows with the square of the length of a text.
SQUARED = {r"\s+$", r"\d{1,3}(?=(?:\d{3})*\b)"}
HARMLESS = {expression for split in SPLITS.values() for expression in split} - SQUARED | {" {2,}"}
REPEATED = 2000  # repetitions of a few characters in a text of the trial at load
# An expression whose characters are absent from a text returns at once, so that each text ends with many characters.
REST = "! The quick brown fox jumps over the lazy dog, 0123456789 times.\n"
TRIED = tuple(sign * REPEATED + REST for sign in ("a", " ", "1", "\n", "aB", "\u00e9", "\u6f22", "a ", "Hello, 24: "))
WORK = Limited(__name__, LIMITS)


class TextCost:
    """JobLimits on the cost of texts for a tokenizer.

    Args:
        backend: tokenizer of the library.

    Attributes:
        most_text: limit of the text of a request, in bytes.
        is_known: true if the time for a text depends on its length alone.
    """

    def __init__(self, backend: Any) -> None:
        parts = {name: getattr(backend, name) for name in PARTS}
        self._rules = {name: None if part is None else json.loads(part.__getstate__()) for name, part in parts.items()}
        self._spelled = json.dumps(self._rules)
        self.is_known = not needs_trial(self._rules)
        self.most_text = MOST_TEXT // max(1, growth(self._rules["normalizer"]) // USUAL_GROWTH)

    def check(self) -> None:
        """Check the cost of the rules.

        Raises:
            RequestError: the rules lengthen a text too much, or take too long.
        """
        if strange := next((each for each in _expressions(self._rules["decoder"]) if each not in HARMLESS), None):
            # Tokens are decoded in the event loop, so the cost of the decoder must be known.
            raise RequestError(f"the tokenizer's decoder has the expression {strange!r}, which no published model has")
        most = max(growth(self._rules["normalizer"]), growth(self._rules["decoder"]))
        if most > MOST_GROWTH:
            raise RequestError(f"the tokenizer makes up to {most} bytes of one, expected at most {MOST_GROWTH}")
        self._try(TRIED)

    def check_text(self, text: str) -> None:
        """Check the cost of a text under rules of unknown cost.

        Raises:
            RequestError: the rules fail, or take too long.
        """
        self._try([text])

    def _try(self, texts: Sequence[str]) -> None:
        if self.is_known:
            return
        try:
            failure = trial(self._spelled, texts)
        except OSError as error:
            words = f"no process could be started to try the tokenizer ({error.strerror})"
            raise RequestError(words, advice="try again later") from error
        if failure is not None:
            raise RequestError(f"the tokenizer {failure} on a text of {max(map(len, texts))} characters")


def growth(rule: Any) -> int:
    """Largest number of bytes that a rule, or a sequence of rules, makes of one.

    Args:
        rule: normaliser or decoder of tokenizer.json; a malformed one counts 1, and the library refuses it.
    """
    match rule:
        case {"type": "Sequence"}:
            made = 1
            for inner in rule.get("normalizers") or rule.get("decoders") or ():
                made *= growth(inner)
            return made
        case {"type": "Replace", "content": str() as content, "pattern": {"String": str() as old}} if old:
            return max(1, -(-len(content.encode()) // len(old.encode())))
        case {"type": "Replace", "content": str() as content}:
            return len(content.encode()) + 1
        case {"type": "Prepend", "prepend": str() as content}:
            return len(content.encode()) + 1
        case {"type": "Precompiled", "precompiled_charsmap": str() as table}:
            held = base64.b64decode(table)
            return max(map(len, held[4 + int.from_bytes(held[:4], "little") :].split(b"\0")), default=1) or 1
    return 1


def needs_trial(rules: Mapping[str, Any]) -> bool:
    """True if the cost of a tokenizer's rules is not known.

    Args:
        rules: parts of tokenizer.json, by the names in PARTS.
    """
    return any(expression not in HARMLESS for part in rules.values() for expression in _expressions(part))


def _expressions(rule: Any) -> Iterator[str]:
    """Regular expressions of a rule; "a table" stands for a precompiled table."""
    if isinstance(rule, list):
        for inner in rule:
            yield from _expressions(inner)
    elif isinstance(rule, dict):
        if rule.get("type") == "Precompiled":
            yield "a table"
        for key, inner in rule.items():
            if key == "Regex":
                yield str(inner)
            else:
                yield from _expressions(inner)


def trial(rules: str, texts: Sequence[str]) -> str | None:
    """Reason why texts cannot be split within the limits; None if they can.

    Args:
        rules: parts of tokenizer.json, by the names in PARTS, as JSON.

    Raises:
        OSError: no process could be started.
    """
    said = WORK.reply(json.dumps([rules, *texts]).encode())
    failure: str | None = str(LIMITS) if said is None else json.loads(said)
    return failure


def begin() -> Callable[[bytes], bytes]:
    """Return the function of a child process that splits texts, and replies with the reason if it cannot."""
    import tokenizers

    @lru_cache(maxsize=1)
    def made(rules: str) -> Any:
        # An empty vocabulary: the cost of the rules does not depend on it.
        empty = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
        return tokenizers.Tokenizer.from_str(json.dumps({**empty, **json.loads(rules)}))

    def split(job: bytes) -> bytes:
        failure = None
        try:
            rules, *texts = json.loads(job)
            tokenizer = made(rules)
            for text in texts:
                tokenizer.encode(text)
                if tokenizer.decoder is not None:
                    tokenizer.decoder.decode([text])
        except BaseException as error:  # panics of the library are no `Exception`
            failure = f"fails ({_first_line(error)})"
        return json.dumps(failure).encode()

    return split


@contextmanager
def worded(doing: str) -> Iterator[None]:
    """Turn errors of the library into RequestError; its panics are no `Exception`.

    Raises:
        RequestError: the library failed.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        words = f"the tokenizer cannot {doing} ({_first_line(error)})"
        raise RequestError(words, advice="check its tokenizer.json") from error


def _first_line(error: BaseException) -> str:
    """First line of an error's message, at most 300 characters; the name of its type without one."""
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
