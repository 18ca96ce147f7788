"""Grammars over the tokens of one model, by llguidance: compiled once per request, copied for every path of a tree.

The cost of a grammar has three limits: a trial in a child process, unless the grammar is small and simple; the limits
of llguidance; and a time per mask, which ends the request if it is exceeded.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sametoken.checkpoint.tokenizer import Tokenizer
from sametoken.engine.grammar_trial import LLGUIDANCE, NoStackError, needs_trial, source, trial, with_stack
from sametoken.errors import ConfigError, RequestError
from sametoken.options.sampling import StructuredOutputs
from sametoken.speculation.draft import PADDING

SENTINEL = "\x02"  # text before a piece, since tokenizers treat the beginning of a text specially
MOST_CHARACTERS = 2**17  # characters of a grammar as JSON: the cost of compiling some grows with their square
MOST_FORCED = 2**14  # most forced bytes in a row: the cost of a mask grows with those that remain
MASK_SECONDS = 0.05  # CPU time for the mask of one token, during which other streams wait
DRAFT_SECONDS = 0.01  # CPU time for the masks of a row's draft in one step; further nodes are not accepted
MOST_TRIED = 256  # kept results of trials
EMPTY = "NoExtensionBias"  # in llguidance's error for a grammar that cannot begin
# In llguidance's errors for schemas within grammars, which this package wrote.
PLACE = re.compile(r"^at \d+\(\d+\): failed to compile JSON schema: ")
LISTING = re.compile(r"\n +\d+ \|.*", re.DOTALL)


class _Words(NamedTuple):
    """Vocabulary in the interface of llguidance."""

    eos_token_id: int
    bos_token_id: int | None
    tokens: list[bytes]
    special_token_ids: list[int]
    tokenizer: Tokenizer

    def __call__(self, piece: bytes | str) -> list[int]:
        """Token ids of a piece inside a text."""
        text = piece.decode() if isinstance(piece, bytes) else piece
        before = self.tokenizer.encode(SENTINEL, add_special_tokens=False)
        ids = self.tokenizer.encode(SENTINEL + text, add_special_tokens=False)
        return ids[len(before) :] if ids[: len(before)] == before else self.tokenizer.encode(text, False)


class Grammars:
    """Compile the structured outputs of requests for one tokenizer.

    Args:
        tokenizer: tokenizer of the target.
        vocab_size: V of the target's logits; ids beyond the tokenizer's are never allowed.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._special = [tokenizer.token_text(token) for token in tokenizer.special_ids if token < vocab_size]
        self._words: Any = None
        self._lock = threading.Lock()
        # Compiling takes at most half of the cores from the engine, for any number of grammars.
        share = max(1, (os.cpu_count() or 1) // 2)
        self._compiling = threading.Semaphore(share)
        # Trials have a semaphore of their own, so that grammars of known cost do not wait for them.
        self._trying = threading.Semaphore(share)
        self._tried: OrderedDict[bytes, str | None] = OrderedDict()  # results of trials, by the grammar's digest

    def compile(self, asked: StructuredOutputs) -> TokenGrammar:
        """Compile a grammar and return its initial state with the first mask; not for the thread that steps the engine.

        Raises:
            RequestError: the grammar is not valid, or too complex.
            ConfigError: llguidance is not installed.
        """
        library = _library()
        with self._lock:
            if self._words is None:
                self._words = self._read(library)
        try:
            form = asdict(asked)
            spelled = json.dumps(form)
        except (ValueError, RecursionError) as error:
            raise _refusal(str(error)) from error
        if len(spelled) > MOST_CHARACTERS:
            raise _refusal(f"the grammar has {len(spelled)} characters, expected at most {MOST_CHARACTERS}")
        if needs_trial(spelled):
            self._try(spelled)
        try:
            with self._compiling:
                return with_stack(lambda: self._compiled(library, form))
        except RequestError:
            raise
        except NoStackError as error:
            words = "there is no memory to compile the grammar"
            raise RequestError(words, field="structured_outputs", advice="try again later") from error
        except (ValueError, RecursionError) as error:
            raise _refusal(str(error)) from error

    def _try(self, spelled: str) -> None:
        """Raise RequestError if compiling a grammar fails or costs too much; the result of the trial is cached."""
        key = hashlib.sha256(spelled.encode()).digest()
        with self._trying:
            with self._lock:
                known, found = key in self._tried, self._tried.get(key)
            if not known:
                try:
                    found = trial(spelled, self._special, self._vocab_size)
                except OSError as error:
                    words = f"no process could be started to try the grammar ({error.strerror})"
                    raise RequestError(words, field="structured_outputs", advice="try again later") from error
        with self._lock:
            self._tried[key] = found
            self._tried.move_to_end(key)
            if len(self._tried) > MOST_TRIED:
                self._tried.popitem(last=False)
        if found is not None:
            raise _refusal(found)

    def _compiled(self, library: Any, asked: Mapping[str, Any]) -> TokenGrammar:
        made, limits = (
            source(library.LLMatcher, asked, self._special),
            library.LLParserLimits(verbose_errors=False, **LLGUIDANCE),
        )
        matcher = library.LLMatcher(self._words, made, log_level=0, limits=limits)
        if matcher.is_error():
            raise _refusal(matcher.get_error())
        grammar = TokenGrammar(matcher, self._vocab_size)
        grammar.prepare()
        return grammar

    def _read(self, library: Any) -> Any:
        """Vocabulary for llguidance, with an end token appended for models without one."""
        tokenizer, size = self._tokenizer, self._vocab_size
        end_ids = [token for token in tokenizer.eos_ids if token < size] or [size]
        tokens = [tokenizer.token_bytes(token) for token in range(size)] + [b"<end>"]
        special = sorted({*tokenizer.special_ids, *end_ids, size} & set(range(size + 1)))
        words = _Words(end_ids[0], tokenizer.bos_id, tokens, special, tokenizer)
        return library.LLTokenizer(library.TokenizerWrapper(words), n_vocab=size + 1, eos_token=end_ids)


class TokenGrammar:
    """State of the grammar for one sequence; see `speculation.structure.Grammar`."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size, self._size = matcher, vocab_size, -(-(vocab_size + 1) // 8)
        self.failure: RequestError | None = None
        self._here: bytes | None = None  # mask of the state; None if not computed
        self._forced: deque[int] | None = None  # forced tokens after the state, None if not computed

    def prepare(self) -> None:
        """Compute the first mask and the forced tokens, and try one token.

        Raises:
            RequestError: no text satisfies the grammar, or a step takes too much work.
        """
        first = self._mask([])
        if (error := self._matcher.get_error()) or not any(first):
            raise _refusal(error or "no token of this model can begin it")
        if (count := len(self._matcher.compute_ff_bytes())) > MOST_FORCED:
            raise _refusal(f"{count} bytes follow each other without a choice, expected at most {MOST_FORCED}")
        tried = self.copy()
        if not tried.accept(next(iter(self.forced(1)), _first_token(first))):
            tried.allowed([PADDING], [PADDING])  # the first mask built the lexer: this one costs as much as later masks
        if tried.failure is not None:
            raise tried.failure
        self._here = first

    def copy(self) -> TokenGrammar:
        """Return a copy for another sequence in an equal state."""
        made = TokenGrammar(self._matcher.deep_copy(), self._vocab_size)
        made.failure, made._here = self.failure, self._here
        made._forced = None if self._forced is None else self._forced.copy()
        return made

    def accept(self, token: int) -> bool:
        if not self._matcher.consume_token(token):
            self._fail(_first_line(self._matcher.get_error()))
        self._here = None
        if (self._forced and self._forced.popleft() != token) or not self._forced:
            self._forced = None
        return bool(self._matcher.is_stopped())

    def allowed(self, tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
        if self._here is None:
            begin = time.thread_time()
            self._here = self._mask([])
            seconds = time.thread_time() - begin
            if self._matcher.is_error():
                self._fail(_first_line(self._matcher.get_error()))
            elif seconds > MASK_SECONDS:
                self._fail(
                    f"the mask of one token took {1000 * seconds:.0f} ms, expected at most {1000 * MASK_SECONDS:.0f}; "
                    "simplify the grammar"
                )
        nothing = bytes(self._size)
        masks = bytearray(self._here if self.failure is None else nothing)
        paths: list[list[int]] = [[]]
        until = time.thread_time() + DRAFT_SECONDS
        for node in range(1, len(tokens)):
            paths.append([*paths[parents[node]], tokens[node]])
            known = self.failure is None and time.thread_time() < until
            masks += self._mask(paths[node]) if known else nothing
        packed = torch.frombuffer(masks, dtype=torch.uint8).view(len(tokens), self._size)[:, :, None]
        bits = (packed >> torch.arange(8, dtype=torch.uint8)) & 1
        return bits.flatten(1)[:, : self._vocab_size].bool()

    def _fail(self, words: str) -> None:
        if EMPTY in words:
            self.failure = self.failure or _refusal(words)
        elif self.failure is None:
            self.failure = RequestError(f"the grammar could not be enforced: {words}", field="structured_outputs")

    def _mask(self, path: list[int]) -> bytes:
        """Mask after a path, one bit per token; all bits are set if the path itself is not allowed."""
        if path and (min(path) < 0 or self._matcher.validate_tokens(path) < len(path)):
            return b"\xff" * self._size
        self._matcher.consume_tokens(path)
        mask: bytes = self._matcher.compute_bitmask()
        self._matcher.rollback(len(path))
        return mask[: self._size].ljust(self._size, b"\x00")

    def forced(self, limit: int) -> list[int]:
        if self._forced is None:
            self._forced = deque(self._matcher.compute_ff_tokens())
        return list(islice(self._forced, limit))


def _first_token(mask: bytes) -> int:
    """First token that a mask allows."""
    byte = next(place for place, bits in enumerate(mask) if bits)
    return 8 * byte + (mask[byte] & -mask[byte]).bit_length() - 1


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise ConfigError(
            "llguidance is not installed; structured outputs need it: pip install 'sametoken[structured]'"
        ) from None
    return llguidance


def _refusal(words: str) -> RequestError:
    if EMPTY in words:
        words = "no text satisfies it: its parts contradict each other, or its references or rules go round in a circle"
    words = " ".join(LISTING.sub("", PLACE.sub("", words)).split())[:300]
    return RequestError(words, field="structured_outputs", advice="correct or simplify it")


def _first_line(words: str) -> str:
    return words.partition("\n")[0][:200]
