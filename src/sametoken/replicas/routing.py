"""Routing: choice of the replica with the least work before a request's first token. Pure functions.

Work is measured in bytes of prompt text. A replica that has read most of a prompt before has the prefix in its KV
cache, and so less work than the others unless it has many more open requests.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

BLOCK = 256  # bytes of a block of text
OPEN_SEQUENCE = 1024  # bytes of prompt that delay a request as much as one more sequence in the batch
BYTES_PER_TOKEN = 4  # of text, about
# Fields that form prompts, in the order of chat templates.
PROMPT_FIELDS = ("tools", "chat_template_kwargs", "instructions", "system", "messages", "input", "prompt")
MOST_SEQUENCES = 1024


class RoutedPrompt(NamedTuple):
    """Prompt of a request, for routing.

    Attributes:
        blocks: for each whole block, a hash of the prompt up to its end.
        size: size of the prompt in bytes.
        sequences: number of sequences of the request in the batch.
    """

    blocks: Sequence[int] = ()
    size: int = 0
    sequences: int = 1


class Candidate(NamedTuple):
    """State of a replica that accepts requests.

    Attributes:
        number: number of the replica.
        sequences: number of open sequences.
        unread: bytes of their prompts that are not in the KV cache yet.
        known: bytes of the new prompt that the replica has read before.
        remembered: number of blocks of all prompts that the replica has read.
    """

    number: int
    sequences: int
    unread: int
    known: int
    remembered: int


def choose(candidates: Sequence[Candidate], size: int) -> int:
    """Number of the replica for a prompt of `size` bytes; among equals, the one with the fewest remembered blocks.

    A known prefix counts if it is at least half of the prompt. Otherwise all prompts that share a few words would go to
    one replica, whose cache would evict prefixes for which others have room.
    """

    def rank(each: Candidate) -> tuple[int, int, int]:
        saved = each.known if 2 * each.known >= size else 0
        return OPEN_SEQUENCE * each.sequences + each.unread + size - saved, each.remembered, each.number

    return min(candidates, key=rank).number


class PrefixMemory:
    """LRU set of prompt prefixes that a replica has read.

    Args:
        tokens: capacity of the KV cache of the replica.
    """

    def __init__(self, tokens: int) -> None:
        self._most = tokens * BYTES_PER_TOKEN // BLOCK
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def known(self, blocks: Sequence[int]) -> int:
        """Length in bytes of the known prefix of a prompt."""
        return BLOCK * next((place for place, block in enumerate(blocks) if block not in self._blocks), len(blocks))

    def add(self, blocks: Sequence[int]) -> None:
        """Add the blocks of a prompt; its last ones are evicted first."""
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)


def prompt_of(body: bytes) -> RoutedPrompt:
    """Prompt of a request's body; for an unreadable body, its size only."""
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
    """Hash, for each whole block, of the text up to its end."""
    hashes, before = [], 0
    for begin in range(0, len(text) - BLOCK + 1, BLOCK):
        before = hash((before, text[begin : begin + BLOCK]))
        hashes.append(before)
    return hashes
