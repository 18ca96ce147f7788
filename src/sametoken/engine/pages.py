"""Number and size of the pages of a pool, for building the pool and for predicting its memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sametoken.drafters.reading import TextWindow
from sametoken.heads.serve import LoadedDraft
from sametoken.model.config import ModelConfig
from sametoken.options.speculation import SpeculativeConfig
from sametoken.runtime.cache import KEY_BLOCK, KVCache
from sametoken.runtime.kv_format import FORMATS


class Cached(NamedTuple):
    """Decoder layers whose keys and values lie in the pages.

    Attributes:
        shape: configuration of the layers.
        dtype: dtype of the vectors.
        kv_format: storage format, a name in `runtime.kv_format`.
    """

    shape: ModelConfig
    dtype: torch.dtype
    kv_format: str

    def page_bytes(self, page: int) -> int:
        """Bytes of a page of `page` tokens."""
        return KVCache.bytes_per_page(self.shape, page, self.dtype, FORMATS[self.kv_format])


def cached_by(target: Cached, draft: LoadedDraft | None) -> list[Cached]:
    """Contents of a page: the target's keys and values, and those of the draft if it has any."""
    if draft is None or draft.cached_layers is None:
        return [target]
    return [target, Cached(draft.cached_layers, draft.module.dtype, target.kv_format)]


def lookahead_of(speculative: SpeculativeConfig, draft: LoadedDraft | None) -> int:
    """Slots past the last token of a row that a draft may need, for any drafter that a request may choose."""
    return 2 + (speculative.most_nodes if draft is None else draft.most_nodes(speculative))


def pool_pages(rows: int, context: int, lookahead: int, page: int) -> int:
    """Pages for `rows` rows at full context, without the sink."""
    return -(-rows * (context + lookahead) // page)


def row_pages(context: int, lookahead: int, page: int) -> int:
    """Number of entries of a row of the page table."""
    return -(-(context + lookahead + KEY_BLOCK) // page)


def short_pages(speculative: SpeculativeConfig, context: int, lookahead: int, page: int) -> int:
    """Pages of a row for a draft model's shortened text; 0 if the longest text is not shortened."""
    slots = TextWindow(speculative.draft_window).slots(context, speculative.most_nodes)
    return min(-(-slots // page), row_pages(context, lookahead, page))


def pool_bytes(cached: Sequence[Cached], page: int, pages: int) -> int:
    """Size of `pages` pages in bytes."""
    return pages * sum(each.page_bytes(page) for each in cached)
