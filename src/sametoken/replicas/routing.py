"""Choice of the replica for a request: the one with the least work before its first token. No processes, no clock.

Work is counted in bytes of prompt text. A replica that has read most of a prompt before has its beginning in the KV
cache, so it has less work than the others unless it has many more open requests.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

BLOCK = 256  # bytes of text that are remembered as one
OPEN_SEQUENCE = 1024  # one more sequence in the batch delays a request as much as so many bytes of prompt
BYTES_PER_TOKEN = 4  # of text, roughly
# What prompts are made of, in the order in which chat templates put it.
PROMPT_FIELDS = ("tools", "chat_template_kwargs", "instructions", "system", "messages", "input", "prompt")
MOST_SEQUENCES = 1024


class RoutedPrompt(NamedTuple):
    """Facts of a request for routing.

    Attributes:
        blocks: a hash for each whole block of the prompt, of everything up to its end.
        size: bytes of the prompt.
        sequences: how many the batch will hold for it.
    """

    blocks: Sequence[int] = ()
    size: int = 0
    sequences: int = 1


class Candidate(NamedTuple):
    """A replica that takes requests.

    Attributes:
        number: of the replica.
        sequences: open ones. `unread`: bytes of their prompts that are not in the cache yet.
        known: bytes of the new prompt that it has read before.
        remembered: blocks of all prompts that it has read.
    """

    number: int
    sequences: int
    unread: int
    known: int
    remembered: int


def choose(candidates: Sequence[Candidate], size: int) -> int:
    """The number of the replica that takes a prompt of `size` bytes; of equals the one that remembers least.

    A beginning counts where it is half of the prompt or more. Otherwise prompts that share a few words would all go to
    one replica, and its cache would forget what the others have room for.
    """

    def rank(each: Candidate) -> tuple[int, int, int]:
        saved = each.known if 2 * each.known >= size else 0
        return OPEN_SEQUENCE * each.sequences + each.unread + size - saved, each.remembered, each.number

    return min(candidates, key=rank).number


class PrefixMemory:
    """Beginnings of prompts that a replica has read lately; those that were used longest ago are forgotten.

    Args:
        tokens: that its KV cache holds for reuse.
    """

    def __init__(self, tokens: int) -> None:
        self._most = tokens * BYTES_PER_TOKEN // BLOCK
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def known(self, blocks: Sequence[int]) -> int:
        """Bytes of a prompt that were read before."""
        return BLOCK * next((place for place, block in enumerate(blocks) if block not in self._blocks), len(blocks))

    def add(self, blocks: Sequence[int]) -> None:
        """A prompt is read; its end is forgotten before its beginning."""
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)


def prompt_of(body: bytes) -> RoutedPrompt:
    """Facts for routing from the body of a request; for an unreadable body, its size only."""
    try:
        given = json.loads(body)
        if not isinstance(given, dict):
            return RoutedPrompt(size=len(body))
        said = "".join(json.dumps(given[name], ensure_ascii=False) for name in PROMPT_FIELDS if name in given)
    except (ValueError, RecursionError):
        return RoutedPrompt(size=len(body))
    text = said.encode("utf-8", "surrogatepass")
    prompts, choices = given.get("prompt"), given.get("n")
    count = len(prompts) if isinstance(prompts, list) and prompts and isinstance(prompts[0], str | list) else 1
    count *= choices if isinstance(choices, int) and choices > 0 else 1
    return RoutedPrompt(block_hashes(text), len(text), min(count, MOST_SEQUENCES))


def block_hashes(text: bytes) -> list[int]:
    """For each whole block a hash of the text up to its end."""
    hashes, before = [], 0
    for begin in range(0, len(text) - BLOCK + 1, BLOCK):
        before = hash((before, text[begin : begin + BLOCK]))
        hashes.append(before)
    return hashes
