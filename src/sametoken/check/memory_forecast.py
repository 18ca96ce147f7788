"""Report of the memory that a model will need: the documented object of `sametoken doctor MODEL --json`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from sametoken.model.held import Share


@dataclass(frozen=True)
class Part:
    """The target or its draft.

    Attributes:
        role: "target", "draft model" or "head".
        path: its directory.
        stored: bytes and tensors of its files by format.
        held: bytes and weights in memory by format, rotary tables among them.
        kv_bytes: of a token in the cache.
    """

    role: str
    path: str
    stored: dict[str, Share]
    held: dict[str, Share]
    kv_bytes: int

    @property
    def weights(self) -> int:
        """Bytes in memory."""
        return sum(share.bytes for share in self.held.values())


@dataclass(frozen=True)
class Remedy:
    """A change with which everything fits, or the least memory that any gets to.

    Attributes:
        change: in words.
        total: bytes with it, of each device where there are several.
    """

    change: str
    total: int


@dataclass(frozen=True)
class MemoryForecast:
    """Memory of a model, its draft and a batch; in bytes unless stated.

    Attributes:
        device: type of device. `memory`: what new tensors may take there, or the limit that was given.
        dtype: of activations and cache.
        batch: sequences. `context`: tokens of each, prompt and output.
        page: tokens of a page. `lookahead`: tokens past each sequence's last one that a draft may need.
        lookahead_pages: pages for them, of all sequences.
        pool: all pages and the page table.
        activations: the peak of one step, estimated.
        total: everything that the process, of several ranks the first one, takes. `fits`: whether `memory` has room.
        ranks: processes that the target is cut for. `other_rank`: bytes of each one but the first, which has the draft.
        uncut: bytes of the target that a rank holds beside its part of the layers: token vectors, its part of the
            output head, norms, rotary tables.
        largest_batch: at this context, 0 if not even one fits. `largest_context`: of this batch, 0 likewise.
        remedies: what would make it fit, none where it fits.
        notes: what was assumed.
    """

    parts: tuple[Part, ...]
    device: str
    memory: int
    dtype: str
    batch: int
    context: int
    page: int
    lookahead: int
    lookahead_pages: int
    pool: int
    activations: int
    total: int
    fits: bool
    ranks: int
    other_rank: int
    uncut: int
    largest_batch: int
    largest_context: int
    remedies: tuple[Remedy, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The documented object of `sametoken doctor MODEL --json`."""
        found = asdict(self)
        for part in found["parts"]:
            for side in ("stored", "held"):
                part[side] = {name: share._asdict() for name, share in part[side].items()}
        return found


def in_words(count: int) -> str:
    """Bytes in GiB or MiB."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
