"""The forecast of memory in words, as `sametoken doctor MODEL` prints it."""

from __future__ import annotations

from sametoken.check.memory_forecast import MemoryForecast, in_words
from sametoken.model.held import Share


def report(found: MemoryForecast) -> str:
    """The forecast for people, one fact a line."""
    rows: list[tuple[str, str]] = []
    for part in found.parts:
        files = sum(share.bytes for share in part.stored.values())
        rows += [
            (part.role, part.path),
            ("  files", f"{in_words(files)}: {_listed(part.stored, 'tensors')}"),
            ("  in memory", f"{in_words(part.weights)}: {_listed(part.held, 'weights')}"),
            ("  cache", f"{part.kv_bytes:,} bytes a token"),
        ]
    fits = "fits" if found.fits else "does not fit"
    first = "" if found.ranks == 1 else ", the first rank"
    if found.ranks > 1:
        all_ranks = found.total + (found.ranks - 1) * found.other_rank
        here = "fits" if all_ranks <= found.memory else "does not fit"
        rows += [
            (
                "ranks",
                f"{found.ranks}: the first takes {in_words(found.total)}, each other {in_words(found.other_rank)}",
            ),
            ("  one machine", f"{in_words(all_ranks)} where all run on it: {here}"),
            (
                "  not cut",
                f"{in_words(found.uncut)} on each rank: token vectors, its part of the output head, norms, rotations",
            ),
        ]
    rows += [
        ("batch", f"{found.batch} sequences of {found.context:,} tokens"),
        ("lookahead", f"{found.lookahead} tokens a sequence, {found.lookahead_pages} pages of {found.page} tokens"),
        ("page pool", f"{in_words(found.pool)} in {found.dtype}"),
        ("activations", f"{in_words(found.activations)} at the peak of a step, estimated"),
        ("total", f"{in_words(found.total)} of {in_words(found.memory)} ({found.device}): {fits}" + first),
        ("largest batch", f"{found.largest_batch or 'none'} at this context"),
        ("largest context", f"{found.largest_context:,} tokens for this batch"),
    ]
    for each in found.remedies:
        name = "would fit with" if each.total <= found.memory else "least memory"
        rows.append((name, f"{each.change}: {in_words(each.total)}"))
    rows += [("note", note) for note in found.notes]
    return "\n".join(f"{name:<16} {words}" for name, words in rows)


def _listed(shares: dict[str, Share], what: str) -> str:
    """The formats and their bytes, without scalars."""
    kept = {name: share for name, share in shares.items() if share.bytes >= 2**20} or shares
    return ", ".join(f"{name} {in_words(share.bytes)} ({share.tensors:,} {what})" for name, share in kept.items())
