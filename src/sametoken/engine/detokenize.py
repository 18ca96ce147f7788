"""Incremental decoding of token ids to text: never a part of a character, never text past a stop string.

Decoding a single token loses spaces and byte sequences, so a window of earlier tokens is decoded together with the new
one, and the difference is the new text. Text that may still change (an incomplete character, the beginning of a stop
string) is held back from the stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sametoken.options.sampling import SamplingParams

INCOMPLETE = "\ufffd"
CONTEXT = (6, 12, 24, 48)  # prompt tokens decoded before the output: more only if fewer begin within a character


class Decodes(Protocol):
    """Methods of a tokenizer that the detokenizer uses."""

    special_ids: frozenset[int]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


def _context(prompt_ids: Sequence[int], special_ids: frozenset[int], longest: int) -> list[int]:
    """End of the prompt after its last special token, where text starts anew, without a leading space."""
    context: list[int] = []
    for token in reversed(prompt_ids[-longest:]):
        if token in special_ids:
            break
        context.append(token)
    return context[::-1]


class Detokenizer:
    """Text of one request.

    Args:
        tokenizer: tokenizer of the target.
        prompt_ids: tokens of the prompt; the last few are the context of the first output token.
        params: stop strings, and flags that include them and special tokens in the text.
    """

    def __init__(self, tokenizer: Decodes, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        self._tokenizer, self._skip_special = tokenizer, params.skip_special_tokens
        for longest in CONTEXT:
            self._ids = _context(prompt_ids, tokenizer.special_ids, longest)
            if not self._decode(self._ids).startswith(INCOMPLETE):
                break
        self._within = self._decode(self._ids).endswith(INCOMPLETE)  # true if the output may begin within a character
        self._start = 0  # first token of the window
        self._read = len(self._ids)  # number of tokens whose text is taken
        self._tried = self._read  # number of tokens that were tried one by one
        self._stop, self._include_stop = tuple(params.stop or ()), params.include_stop_str_in_output
        self._searched = 0
        self._sent = 0
        self._done = False
        self.text = ""

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special)

    def push(self, token: int) -> None:
        """Add a token; without stop strings the text is decoded later, in `delta`."""
        self._ids.append(token)
        if self._stop:
            self._decode_new()

    def _decode_new(self) -> None:
        """Take the text of new tokens up to the last complete character.

        The text depends on the ids alone, not on the number of ids per call. Around an invalid byte, decoded text
        depends on where tokens are divided, so these tokens are taken one by one.
        """
        end = len(self._ids)
        if self._read == end:
            return
        text = self._new_text(end)
        if INCOMPLETE not in text:
            self._take(text, end)
            return
        for piece in range(max(self._tried, self._read) + 1, end + 1):
            text = self._new_text(piece)
            if not text.endswith(INCOMPLETE):
                self._take(text, piece)
        self._tried = end

    def _new_text(self, end: int) -> str:
        """Text that the tokens before `end` add to the text taken so far."""
        before = self._decode(self._ids[self._start : self._read])
        after = self._decode(self._ids[self._start : end])
        if after.startswith(before):
            return after[len(before) :]
        complete = before.rstrip(INCOMPLETE)
        if complete != before and after.startswith(complete):  # the output completes the prompt's last character
            return after[len(complete) :]
        # Byte tokens are decoded as one run; an invalid one turns complete characters before it into U+FFFD.
        return self._decode(self._ids[self._read : end])

    def _take(self, text: str, end: int) -> None:
        if text:  # tokens without text stay in the window: alone before a word they would remove its space
            self.text += text
            self._start = self._start if self._within else self._read  # a window never begins within a character
            self._read, self._within = end, False

    def find_stop(self) -> str | None:
        """Find the earliest stop string in the text and cut the text there; None without one."""
        if not self._stop:
            return None
        begins = [(stop, max(0, self._searched - len(stop) + 1)) for stop in self._stop]
        self._searched = len(self.text)
        hits = [(at, stop) for stop, begin in begins if (at := self.text.find(stop, begin)) >= 0]
        if not hits:
            return None
        at, stop = min(hits)
        self.text = self.text[: at + len(stop) * self._include_stop]
        self._done = True
        return stop

    def pass_stop(self) -> None:
        """Ignore the stop strings in the text so far."""
        self._searched = len(self.text)

    def finish(self) -> None:
        """End the text; an incomplete character stays as a replacement character."""
        if not self._done:
            self._decode_new()
            self._take(self._new_text(len(self._ids)), len(self._ids))
        self._done = True

    def delta(self) -> str:
        """Final text that has not been returned yet."""
        if not self._done:
            self._decode_new()
        end = len(self.text) if self._done else len(self.text) - self._undecided()
        text, self._sent = self.text[self._sent : end], max(self._sent, end)
        return text

    def _undecided(self) -> int:
        """Length of the longest end of the text that is the beginning of a stop string."""
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self.text)), longest, -1):
                if self.text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
