"""Grammars over the tokens of one model, by llguidance: compiled once per request, forked for every path of a tree."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from sametoken.checkpoint.tokenizer import Tokenizer
from sametoken.errors import ConfigError, RequestError
from sametoken.speculation.structure import StructuredOutputs

# JSON is written as Python's json.dumps writes it: a form without free white space leaves more tokens without a choice.
JSON_FORM = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
SENTINEL = "\x02"  # text before a piece, since tokenizers treat the beginning of a text differently
PADDING = -1
MOST_CHARACTERS = 2**17  # of a form, as JSON: the work of compiling some grows with the square
# Bytes, taken as far as they are used: llguidance follows rules by recursion, and without room it ends the process.
STACK = 2**29
STARTS = threading.Lock()  # the size of stacks is the process's


T = TypeVar("T")


class _Words(NamedTuple):
    """A vocabulary as llguidance asks for it."""

    eos_token_id: int
    bos_token_id: int | None
    tokens: list[bytes]
    special_token_ids: list[int]
    tokenizer: Tokenizer

    def __call__(self, piece: bytes | str) -> list[int]:
        """Token ids of a piece from within a text."""
        text = piece.decode() if isinstance(piece, bytes) else piece
        before = self.tokenizer.encode(SENTINEL, add_special_tokens=False)
        ids = self.tokenizer.encode(SENTINEL + text, add_special_tokens=False)
        return ids[len(before) :] if ids[: len(before)] == before else self.tokenizer.encode(text, False)


class Grammars:
    """Compiles forms for one tokenizer.

    Args:
        tokenizer: whose tokens are constrained.
        vocab_size: V of the target's scores; ids beyond the tokenizer's are never allowed.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._words: Any = None
        self._lock = threading.Lock()

    def compile(self, asked: StructuredOutputs) -> TokenGrammar:
        """The grammar of a form, at its beginning.

        Raises:
            RequestError: the form is not valid, or too complex.
            ConfigError: llguidance is not installed.
        """
        library = _library()
        with self._lock:
            if self._words is None:
                self._words = self._read(library)
        try:
            size = len(json.dumps(asdict(asked)))
        except (ValueError, RecursionError) as error:
            raise _refusal(str(error)) from error
        if size > MOST_CHARACTERS:
            raise _refusal(f"the form has {size} characters, expected at most {MOST_CHARACTERS}")
        try:
            matcher = _with_stack(lambda: self._matcher(library, asked))
        except RequestError:
            raise
        except (ValueError, RecursionError) as error:
            raise _refusal(str(error)) from error
        if matcher.is_error():
            raise _refusal(matcher.get_error())
        return TokenGrammar(matcher, self._vocab_size)

    def _matcher(self, library: Any, asked: StructuredOutputs) -> Any:
        source, limits = _source(library.LLMatcher, asked), library.LLParserLimits(verbose_errors=False)
        return library.LLMatcher(self._words, source, log_level=0, limits=limits)

    def _read(self, library: Any) -> Any:
        """The vocabulary; behind it stands an end token for models that have none."""
        tokenizer, size = self._tokenizer, self._vocab_size
        ends = [token for token in tokenizer.eos_ids if token < size] or [size]
        tokens = [tokenizer.token_bytes(token) for token in range(size)] + [b"<end>"]
        special = sorted({*tokenizer.special_ids, *ends, size} & set(range(size + 1)))
        words = _Words(ends[0], tokenizer.bos_id, tokens, special, tokenizer)
        return library.LLTokenizer(library.TokenizerWrapper(words), n_vocab=size + 1, eos_token=ends)


class TokenGrammar:
    """The state of one sequence; see `speculation.structure.Grammar`."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size
        self.failure: str | None = None

    def copy(self) -> TokenGrammar:
        """Another sequence in the same state."""
        return TokenGrammar(self._matcher.deep_copy(), self._vocab_size)

    def accept(self, token: int) -> bool:
        if not self._matcher.consume_token(token) and self.failure is None:
            self.failure = f"the form could not be kept: {_first_line(self._matcher.get_error())}"
        return bool(self._matcher.is_stopped())

    def allowed(self, tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
        size = -(-(self._vocab_size + 1) // 8)
        masks = bytearray()
        paths: list[list[int]] = [[]]
        for node, token in enumerate(tokens):
            if node:
                paths.append([*paths[parents[node]], token])
            masks += self._mask(paths[node], size)
        packed = torch.frombuffer(masks, dtype=torch.uint8).view(len(tokens), size)[:, :, None]
        bits = (packed >> torch.arange(8, dtype=torch.uint8)) & 1
        return bits.flatten(1)[:, : self._vocab_size].bool()

    def _mask(self, path: list[int], size: int) -> bytes:
        """One bit per token; all are set where the path itself is not allowed."""
        everything = b"\xff" * size
        if path and (min(path) < 0 or self._matcher.validate_tokens(path) < len(path)):
            return everything
        self._matcher.consume_tokens(path)
        mask: bytes = self._matcher.compute_bitmask()
        self._matcher.rollback(len(path))
        return mask[:size].ljust(size, b"\x00")

    def forced(self, limit: int) -> list[int]:
        tokens: list[int] = self._matcher.compute_ff_tokens()
        return tokens[:limit]


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise ConfigError(
            "structured outputs need llguidance; it is not there: pip install 'sametoken[structured]'"
        ) from None
    return llguidance


def _with_stack(work: Callable[[], T]) -> T:
    """What `work` returns or raises, on a thread with a large stack."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, name="sametoken-form", daemon=True)
    with STARTS:
        usual = threading.stack_size(STACK)
        try:
            thread.start()
        except RuntimeError as error:
            raise RequestError("structured_outputs: there is no memory to compile the form; try again later") from error
        finally:
            threading.stack_size(usual)
    return done.result()


def _source(matcher: Any, asked: StructuredOutputs) -> str:
    """The form in llguidance's own notation."""
    if asked.json_object:
        made = matcher.grammar_from_json_schema({"type": "object"}, JSON_FORM)
    elif asked.json is not None:
        made = matcher.grammar_from_json_schema(json.dumps(asked.json), JSON_FORM)
    elif asked.regex is not None:
        made = matcher.grammar_from_regex(asked.regex)
    elif asked.choice is not None:
        made = matcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in asked.choice))
    else:
        made = matcher.grammar_from_lark(asked.grammar)
    return str(made)


def _refusal(words: str) -> RequestError:
    return RequestError(f"structured_outputs: {' '.join(words.split())[:300]}; correct or simplify it")


def _first_line(words: str) -> str:
    return words.partition("\n")[0][:200]
