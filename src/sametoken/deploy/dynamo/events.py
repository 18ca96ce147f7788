"""KV events of the prefix cache for Dynamo's router: which pages the engine offers to other requests.

A page is offered once it is full and all its tokens are committed, so no rejected guess is ever in an event.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Publisher(Protocol):
    """The part of Dynamo's `KvEventPublisher` that is used."""

    def publish_stored(
        self, token_ids: list[int], num_block_tokens: list[int], block_hashes: list[int], parent_hash: int | None
    ) -> None: ...

    def publish_removed(self, block_hashes: list[int]) -> None: ...


class PageEvents:
    """Listener of the block manager that passes its events to a publisher, on the engine's thread."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher

    def stored(self, digest: bytes, parent: bytes, tokens: Sequence[int]) -> None:
        """A page is offered; `parent` is the digest of the page before it, b"" for the first."""
        parent_hash = hash_of(parent) if parent else None
        self._publisher.publish_stored(list(tokens), [len(tokens)], [hash_of(digest)], parent_hash)

    def removed(self, digest: bytes) -> None:
        """A page is offered no more."""
        self._publisher.publish_removed([hash_of(digest)])


def hash_of(digest: bytes) -> int:
    """Dynamo's name of a page: signed 64 bits of the digest of everything up to and including it."""
    return int.from_bytes(digest[:8], signed=True)
