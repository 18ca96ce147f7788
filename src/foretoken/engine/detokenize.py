"""Token ids to text as they arrive: never half a character, never text past a stop string.

Decoding a token alone loses spaces and byte sequences, so a window of earlier tokens is decoded with it and the
difference is the new text. Text that may still change (an incomplete character, the beginning of a stop string) is
held back from the stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from foretoken.speculation.params import SamplingParams

INCOMPLETE = "\ufffd"
CONTEXT = 6  # tokens decoded before the window, enough for a decoder that strips a leading space


class Decodes(Protocol):
    """What the detokenizer needs of a tokenizer."""

    special_ids: frozenset[int]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


def _context(prompt_ids: Sequence[int], special_ids: frozenset[int]) -> list[int]:
    """The end of the prompt, from its last special token on: text begins anew there, without a space before it."""
    context: list[int] = []
    for token in reversed(prompt_ids[-CONTEXT:]):
        if token in special_ids:
            break
        context.append(token)
    return context[::-1]


class Detokenizer:
    """Text of one request.

    Args:
        tokenizer: decodes ids.
        prompt_ids: their last few give the first output token its context.
        params: its stop strings, and whether they and special tokens appear in the text.
    """

    def __init__(self, tokenizer: Decodes, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        self._tokenizer, self._skip_special = tokenizer, params.skip_special_tokens
        self._ids = _context(prompt_ids, tokenizer.special_ids)
        self._start = 0  # the window's first token
        self._read = len(self._ids)  # tokens whose text is out
        self._stop, self._include_stop = tuple(params.stop or ()), params.include_stop_str_in_output
        self._searched = 0
        self._sent = 0
        self._done = False
        self.text = ""

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special)

    def push(self, token: int) -> None:
        """Adds a token; without stop strings the text is decoded later, when it is asked for."""
        self._ids.append(token)
        if self._stop:
            self._decode_new()

    def _decode_new(self) -> None:
        if self._read == len(self._ids):
            return
        before = self._decode(self._ids[self._start : self._read])
        after = self._decode(self._ids[self._start :])
        if len(after) > len(before) and not after.endswith(INCOMPLETE):
            self._take(after[len(before) :])

    def _take(self, text: str) -> None:
        self.text += text
        self._start, self._read = max(self._read - CONTEXT, 0), len(self._ids)

    def find_stop(self) -> str | None:
        """The stop string that the text now contains, the earliest one, or None; cuts the text there."""
        if not self._stop:
            return None
        begin = max(0, self._searched - max(map(len, self._stop)) + 1)
        self._searched = len(self.text)
        hits = [(at, stop) for stop in self._stop if (at := self.text.find(stop, begin)) >= 0]
        if not hits:
            return None
        at, stop = min(hits)
        self.text = self.text[: at + len(stop) * self._include_stop]
        self._done = True
        return stop

    def finish(self) -> None:
        """No more tokens: what is incomplete stays as replacement characters."""
        if not self._done:
            before, after = self._decode(self._ids[self._start : self._read]), self._decode(self._ids[self._start :])
            self._take(after[len(before) :])
        self._done = True

    def delta(self) -> str:
        """Text not handed out before that cannot change any more."""
        if not self._done:
            self._decode_new()
        end = len(self.text) if self._done else len(self.text) - self._held()
        text, self._sent = self.text[self._sent : end], max(self._sent, end)
        return text

    def _held(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self.text)), longest, -1):
                if self.text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
