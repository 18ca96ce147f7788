"""Prompt lookup (Saxena 2023): a draft copies the tokens after an earlier occurrence of the row's last n tokens.

Works on token ids only; the work of a step does not depend on how long the row's context is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor

from sametoken.drafters.base import ANYONE, Drafter, Proposed, RowOrigin
from sametoken.drafters.padded import chain
from sametoken.errors import ConfigError
from sametoken.options.speculation import SpeculativeConfig

Text = list[int]
Place = tuple[Text, int]  # a text and the index of the token that follows the n-gram

MAX_PUBLIC_POOLS = 8  # owners whose texts are kept
MAX_POOL_NGRAMS = 2**20  # memory of a pool: 100 to 250 bytes per n-gram, so a context of 32k tokens takes 10 to 25 MB


class NgramPool:
    """Index with one occurrence of every n-gram: the newest, or the oldest that is still stored.

    Two generations bound the memory: when the young one is full, it replaces the old one. (A dict that evicts its
    first key one at a time would scan its own tombstones.)

    Args:
        sizes: n-gram sizes, the longest first.
        is_use_oldest: keep the first occurrence of an n-gram rather than the last.
        max_ngrams: n-grams stored, both generations together.
    """

    def __init__(self, sizes: range, is_use_oldest: bool, max_ngrams: int) -> None:
        self._sizes = sizes
        self._is_use_oldest = is_use_oldest
        self._generation_size = max_ngrams // 2
        self._young: dict[tuple[int, ...], Place] = {}
        self._old: dict[tuple[int, ...], Place] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def note(self, text: Text) -> None:
        """Index the n-grams that end with the last token of `text`; the pool keeps a reference to `text`."""
        place = (text, len(text))
        for size in self._sizes:
            if size > len(text):
                continue
            key = tuple(text[-size:])
            if not (self._is_use_oldest and (key in self._young or key in self._old)):
                self._young[key] = place
        if len(self._young) >= self._generation_size:
            self._old, self._young = self._young, {}

    def continuation(self, text: Text, pending: int, limit: int) -> list[int]:
        """At most `limit` tokens that followed the longest indexed n-gram at the end of `text + [pending]`, or []."""
        for size in self._sizes:
            if size > len(text) + 1:
                continue
            key = (*text[len(text) + 1 - size :], pending)
            place = self._young.get(key) or self._old.get(key)
            if place is None:
                continue
            source, end = place
            found = source[end : end + limit]
            if source is text:
                # The copy may run past the end of the text into the pending token and then into itself:
                # from there it repeats, with the distance between the two occurrences as its period.
                period = len(text) + 1 - end
                found = [*found, pending][:limit]
                found.extend(found[i % period] for i in range(len(found), limit))
            if found:
                return found
        return []


class NgramDrafter(Drafter):
    """Drafter that copies the tokens after an earlier (by default the last) occurrence of the longest matching n-gram.

    Args:
        max_draft_len: longest chain.
        max_matching_ngram_size: longest n-gram looked up (vLLM: prompt_lookup_max).
        min_matching_ngram_size: shortest n-gram looked up (vLLM: prompt_lookup_min).
        is_use_oldest: copy from the oldest occurrence instead of the most recent.
        is_public_pool: share one pool among all rows of an owner, released rows included, instead of one per row.

    Raises:
        ConfigError: a size is out of range.
    """

    def __init__(
        self,
        *,
        max_draft_len: int,
        max_matching_ngram_size: int = 3,
        min_matching_ngram_size: int = 1,
        is_use_oldest: bool = False,
        is_public_pool: bool = False,
    ) -> None:
        if max_draft_len < 0:
            raise ConfigError(f"max_draft_len={max_draft_len}: expected 0 or more; 4 to 8 suits most texts")
        if not 1 <= min_matching_ngram_size <= max_matching_ngram_size:
            raise ConfigError(
                f"min_matching_ngram_size={min_matching_ngram_size} and max_matching_ngram_size="
                f"{max_matching_ngram_size}: expected 1 <= min <= max; set both, for example 1 and 3"
            )
        self.nodes = max_draft_len
        self._sizes = range(max_matching_ngram_size, min_matching_ngram_size - 1, -1)
        self._is_use_oldest = is_use_oldest
        self._is_public_pool = is_public_pool
        self._public: OrderedDict[str, NgramPool] = OrderedDict()  # by owner, in the order of last use
        self._rows: dict[int, tuple[Text, NgramPool]] = {}

    def admit(self, row: int, cached: Sequence[int], draft_cached: int = 0, origin: RowOrigin = ANYONE) -> None:
        self._rows[row] = [], self._public_pool(origin.owner) if self._is_public_pool else self._pool()
        self._extend(row, cached)

    def observe(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], features: Tensor | None) -> None:
        for row, committed in zip(rows, tokens, strict=True):
            self._extend(row, committed)

    def propose(
        self, rows: Sequence[int], pending: Sequence[int], limits: Sequence[int], sampling: object, worth: object = None
    ) -> Proposed:
        """Draft chains of at most `limits[i]` and `nodes` draft tokens.

        `sampling` is ignored: a copy has no logits to rank under its noise.
        """
        guesses = []
        for row, root, limit in zip(rows, pending, limits, strict=True):
            text, pool = self._rows[row]
            guesses.append(chain(pool.continuation(text, root, min(limit, self.nodes))))
        return Proposed(guesses)

    def release(self, row: int) -> None:
        """Drop the state of `row`; its n-grams in a public pool stay."""
        self._rows.pop(row, None)

    def slots(self, limit: int) -> int:
        return min(limit, self.nodes)

    def _public_pool(self, owner: str) -> NgramPool:
        pool = self._public.setdefault(owner, self._pool())
        self._public.move_to_end(owner)
        if len(self._public) > MAX_PUBLIC_POOLS:
            self._public.popitem(last=False)
        return pool

    def _pool(self) -> NgramPool:
        return NgramPool(self._sizes, self._is_use_oldest, MAX_POOL_NGRAMS)

    def _extend(self, row: int, tokens: Sequence[int]) -> None:
        text, pool = self._rows[row]
        for token in tokens:
            text.append(token)
            pool.note(text)


def build(config: SpeculativeConfig) -> Drafter:
    """Build the drafter from these settings."""
    return NgramDrafter(
        max_draft_len=config.longest,
        max_matching_ngram_size=config.max_matching_ngram_size,
        min_matching_ngram_size=config.min_matching_ngram_size,
        is_use_oldest=config.is_use_oldest,
        is_public_pool=config.is_public_pool,
    )
