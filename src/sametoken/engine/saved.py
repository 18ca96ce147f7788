"""Keys and values of a sequence in a file, so that a long prompt is computed only once.

A file has a line of JSON, the token ids, the contents of the sequence's full pages in each cache, and a digest of all
bytes before. It is valid for engines with equal model, draft, number formats and kernels.
"""

from __future__ import annotations

import hashlib
import json
import math
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sametoken.engine.engine import Engine
from sametoken.errors import DataError
from sametoken.files import replacing
from sametoken.runtime.cache import KVCache

KIND = "sametoken-sequence"
VERSION = 1  # of the file format
DIGEST = 32  # bytes of the digest at the end
SAVE_AGAIN = "save it again"


class Kept(NamedTuple):
    """Cached state of a sequence.

    Attributes:
        tokens: tokens of full pages, and the token after them if there is one.
        pages: number of pages.
        drafts: number of leading tokens with keys and values of each drafter, by drafter.
        parts: contents of the pages in every cache, see `_take`.
    """

    tokens: list[int]
    pages: int
    drafts: dict[str, int]
    parts: list[Tensor]

    def cached(self, page_size: int) -> int:
        """Number of tokens that need not be computed again."""
        return self.pages * page_size


def keep(engine: Engine, tokens: Sequence[int], salt: bytes = b"") -> Kept:
    """Copy the cached beginning of a sequence; call on the thread that steps the engine.

    Args:
        engine: engine with the cache.
        tokens: tokens of the sequence.
        salt: salt of the requests that share the sequence, see `BlockManager.match`.
    """
    blocks = engine.scheduler.blocks
    pages, drafts = blocks.offered(tokens, salt)
    held = list(tokens[: len(pages) * blocks.page_size + 1])
    return Kept(held, len(pages), drafts, _take(engine.caches, pages))


def give(engine: Engine, kept: Kept, salt: bytes = b"") -> None:
    """Put a sequence back into the cache, for requests that begin with it; call on the thread that steps the engine.

    Args:
        engine: engine with the cache.
        kept: sequence.
        salt: salt of the requests that may use the sequence.

    Raises:
        DataError: the cache has too few free pages.
    """
    blocks = engine.scheduler.blocks
    pages = blocks.allocate(kept.pages)
    if pages is None:
        words = f"the sequence has {kept.pages} pages of the cache, {blocks.available} are free"
        raise DataError(words, advice="raise kv_cache_max_tokens, or try again when other requests have ended")
    _put(engine.caches, pages, kept.parts)
    for drafter, cached in (kept.drafts or {"": 0}).items():
        blocks.publish(kept.tokens, pages, drafter, cached, salt=salt)
    blocks.free(pages)


def write(kept: Kept, file: Path, made_by: str) -> int:
    """Write a file and return its size in bytes.

    Args:
        kept: sequence.
        file: path of the file.
        made_by: `LLM.fingerprint` of the engine.

    Raises:
        DataError: the disk is full, or the file cannot be written.
    """
    head = {"kind": KIND, "version": VERSION, "made_by": made_by, "tokens": len(kept.tokens), "pages": kept.pages,
            "drafts": kept.drafts}  # fmt: skip
    digest = hashlib.blake2b(digest_size=DIGEST)
    with replacing(file) as part:
        with part.open("wb") as stream:
            first = json.dumps(head).encode() + b"\n"
            tokens = torch.tensor(kept.tokens, dtype=torch.int64)
            for piece in (first, *map(_bytes, (tokens, *kept.parts))):
                digest.update(piece)
                stream.write(piece)
            stream.write(digest.digest())
        return part.stat().st_size


def read(engine: Engine, file: Path, made_by: str) -> tuple[Kept, int]:
    """Read a file; return its sequence and its size in bytes. May be called on any thread.

    Raises:
        DataError: the file is missing, too large, truncated, altered, or of another engine.
    """
    most = 2**20 + 2 * sum(whole.nbytes for whole in _paged(engine.caches))  # a header, ids and every page
    try:
        if not stat.S_ISREG((found := file.stat()).st_mode):
            raise DataError(f"{file.name}: not a regular file", advice=SAVE_AGAIN)
        if found.st_size > most:
            words = f"got {found.st_size} bytes, expected at most {most}, which hold the whole KV cache"
            raise DataError(f"{file.name}: {words}", advice=SAVE_AGAIN)
        whole = bytearray(file.read_bytes())
    except OSError as error:
        raise DataError(f"{file.name}: {error.strerror}", advice=SAVE_AGAIN) from error
    body, end = memoryview(whole)[:-DIGEST], whole[-DIGEST:]
    if hashlib.blake2b(body, digest_size=DIGEST).digest() != end:
        raise DataError(f"{file.name}: truncated or altered since it was written", advice=SAVE_AGAIN)
    first = bytes(whole[: whole.find(b"\n") + 1])
    head = _header(first)
    if head.get("kind") != KIND or head.get("version") != VERSION:
        raise DataError(f"{file.name}: no sequence of this version of sametoken", advice=SAVE_AGAIN)
    if head.get("made_by") != made_by:
        words = "written with another model, draft, number format or other kernels than this server has"
        raise DataError(f"{file.name}: {words}", advice=f"start the server that wrote it, or {SAVE_AGAIN}")
    if (kept := _parts(engine, head, body[len(first) :])) is None:
        raise DataError(f"{file.name}: its header does not match its content", advice=SAVE_AGAIN)
    return kept, len(whole)


def _header(line: bytes) -> dict[str, Any]:
    """Header of a file; {} for a line that is no object of JSON."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _parts(engine: Engine, head: Mapping[str, Any], rest: memoryview) -> Kept | None:
    """Sequence from the bytes after a header; None if a number in it is wrong, or their size does not match it."""
    given: list[Any] = [head.get(name) for name in ("tokens", "pages", "drafts")]
    tokens, pages, drafts = given
    counts = [tokens, pages, *(drafts.values() if isinstance(drafts, dict) else [None])]
    if not all(type(count) is int and 0 <= count <= len(rest) for count in counts):
        return None
    if tokens - pages * engine.table.page_size not in (0, 1) or max(drafts.values(), default=0) > tokens:
        return None
    wanted = [(torch.int64, (tokens,)), *_shapes(engine.caches, pages)]
    sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in wanted]
    if sum(sizes) != len(rest):
        return None
    whole, parts, start = torch.frombuffer(rest, dtype=torch.uint8), list[Tensor](), 0
    for (dtype, shape), size in zip(wanted, sizes, strict=True):
        parts.append(whole[start : start + size].clone().view(dtype).view(shape))
        start += size
    return Kept(parts[0].tolist(), pages, drafts, parts[1:])


def _bytes(tensor: Tensor) -> bytes:
    # Flat first: an empty tensor is contiguous with any strides, and bytes of such ones cannot be viewed.
    return tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


def _take(caches: Sequence[KVCache], pages: Sequence[int]) -> list[Tensor]:
    """Copy the contents of these pages of the caches to the host, in a fixed order.

    Returns:
        Tensors [layers, len(pages), page size, ...]: keys, values and their scales, as far as a cache has them.
    """
    return [whole[:, _index(pages, whole)].cpu() for whole in _paged(caches)]


def _put(caches: Sequence[KVCache], pages: Sequence[int], kept: Sequence[Tensor]) -> None:
    """Write the result of `_take`, of this or an equal engine, to these pages."""
    for whole, part in zip(_paged(caches), kept, strict=True):
        whole[:, _index(pages, whole)] = part.to(whole.device)


def _shapes(caches: Sequence[KVCache], pages: int) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of each result of `_take` for this number of pages."""
    return [(whole.dtype, (whole.shape[0], pages, *whole.shape[2:])) for whole in _paged(caches)]


def _paged(caches: Sequence[KVCache]) -> list[Tensor]:
    """Tensors of the caches as pages: [layers, pages, page size, ...]."""
    parts = [part for cache in caches for pair in cache.stored for part in pair if part is not None]
    size = caches[0].table.page_size
    return [part.view(part.shape[0], -1, size, *part.shape[2:]) for part in parts]


def _index(pages: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(pages, dtype=torch.int64, device=like.device)
