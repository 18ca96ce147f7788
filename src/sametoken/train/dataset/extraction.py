"""Extraction of hidden states of prepared samples, by a target in this process or on servers, shard by shard.

Shards are written atomically, so an interrupted run can continue, and several processes can divide the shards.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from sametoken.errors import ConfigError, DataError
from sametoken.files import discard_parts, make_directory, write_tensors
from sametoken.heads.taps import parse_layers
from sametoken.learning.modes import TRAINED
from sametoken.learning.target import Features
from sametoken.model.decoder import Decoder
from sametoken.runtime.cache import KVCache, PageTable, Span
from sametoken.speculation.draft import chain_mask
from sametoken.train.dataset.hidden_states import (
    DIRECTORY,
    DTYPES,
    FORMAT,
    SHARD_BYTES,
    HiddenSpec,
    HiddenStates,
    claim,
    encode,
    write_stamp,
)
from sametoken.train.dataset.prepared import SAMPLES, Prepared

PIECE_TOKENS = 512  # tokens per forward
PAGE = 32
# From samples [S] to hidden states [S, n + 1, H] of each: the taps, and the last state after the final norm.
Reader = Callable[[Sequence[Tensor]], Iterable[Tensor]]
UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30,
         "tib": 1 << 40}  # fmt: skip


class FeatureReader:
    """Target that reads one sequence at a time, in pieces, with its own KV cache.

    Args:
        decoder: decoder of the target.
        taps: 0-based blocks whose outputs are returned.
        longest: length of the longest sequence.
    """

    def __init__(self, decoder: Decoder, taps: tuple[int, ...], longest: int) -> None:
        self._decoder, self._taps = decoder, taps
        self.device = decoder.embed.device
        pages = -(-(longest + 1) // PAGE)
        self._table = PageTable(1, pages + 1, pages, PAGE, self.device)
        self._table.extend(0, range(1, pages + 1))
        self._cache = KVCache.of(decoder.config, self._table, decoder.dtype, self.device)

    def __call__(self, tokens: Tensor) -> Tensor:
        """Hidden states [S, n + 1, H] of `tokens` [S] in the decoder's dtype: taps, last state after the norm."""
        return torch.cat([self.piece(tokens, start) for start in range(0, len(tokens), PIECE_TOKENS)])

    @torch.no_grad()
    def piece(self, tokens: Tensor, start: int) -> Tensor:
        """States of the tokens from `start`, at most `PIECE_TOKENS`; all tokens before `start` must have been read."""
        tokens = tokens[start : start + PIECE_TOKENS]
        count, place = len(tokens), torch.tensor([start], device=self.device)
        ancestor_mask = chain_mask(1, count, self.device)
        span = Span(torch.zeros_like(place), (0,), place, ancestor_mask, count, start + count)
        hidden = self._decoder.run(tokens.to(self.device, torch.int64), self._cache, [span], self._taps)
        return torch.stack([*hidden.taps, self._decoder.norm(hidden.last)], dim=1)


def features(states: Tensor) -> Features:
    """Features of a sample from the result of `FeatureReader`."""
    return Features(states[:, :-1].flatten(1), states[:, -1])


class Extracted(NamedTuple):
    """Result of an extraction: shards written by this run, shards of its part, and missing shards of other parts."""

    written: int
    own: int
    missing: int


def parse_taps(text: str, layers: int) -> tuple[int, ...]:
    """Parse blocks, for example "2,8,13", or the name of a training mode.

    Raises:
        ConfigError: the text is neither, or the target has no such block.
    """
    if text in TRAINED:
        return TRAINED[text].training.taps(layers)
    return parse_layers(text, layers, TRAINED)


def parse_bytes(text: str, option: str = "budget") -> int:
    """Parse a size in bytes, for example "50GB", "1.5 TiB" or a number.

    Raises:
        ConfigError: the text is not a size.
    """
    found = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    unit = UNITS.get(found[2].removesuffix("b") + "b" if found[2] else "") if found else None
    if found is None or unit is None:
        raise ConfigError(f"--{option} {text!r}: expected a size such as 50GB or 1.5TiB")
    return int(float(found[1]) * unit)


def parse_part(text: str) -> tuple[int, int]:
    """Parse a number and a count, for example "0/4".

    Raises:
        ConfigError: the text is not a part.
    """
    found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text.strip())
    if found is None or int(found[1]) >= int(found[2]):
        raise ConfigError(f"--shard {text!r}: expected number/count with numbers from 0, such as 0/4")
    return int(found[1]), int(found[2])


def run_here(prepared: Prepared, decoder: Decoder, taps: tuple[int, ...]) -> Reader:
    """Reader that runs the target in this process, one sample at a time."""
    reader = FeatureReader(decoder, taps, max(prepared.lengths()))
    return lambda samples: map(reader, samples)


def spec_of(
    prepared: Prepared, hidden_size: int, computed_in: torch.dtype, taps: tuple[int, ...], dtype: str,
    shard_bytes: int = SHARD_BYTES,
) -> HiddenSpec:  # fmt: skip
    """Specification of the hidden states of these samples and this target.

    Args:
        hidden_size: hidden size of the target.
        computed_in: dtype in which the target runs.

    Raises:
        ConfigError: there is no such dtype.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"--hidden-dtype {dtype!r}: expected {' or '.join(DTYPES)}")
    origin = prepared.manifest.origin
    return HiddenSpec(
        FORMAT, origin.target, origin.target_digest, origin.tokenizer_digest, prepared.manifest.files[SAMPLES].sha256,
        taps, hidden_size, dtype, str(computed_in).removeprefix("torch."), shard_bytes,
    )  # fmt: skip


def check_size(prepared: Prepared, spec: HiddenSpec, budget: int | None) -> int:
    """Size in bytes of all hidden states; raise if they do not fit, before anything is written.

    Args:
        budget: limit in bytes, None for the free space of the disk.

    Raises:
        DataError: they exceed the budget or the free space.
    """
    lengths = prepared.lengths()
    size = sum(lengths) * spec.bytes_per_token
    each = f"{sum(lengths)} tokens of {spec.bytes_per_token} bytes"
    smaller = "use fewer samples, a smaller --max-len, fewer --taps" + (
        " or --hidden-dtype fp8" if spec.dtype != "fp8" else ""
    )
    if budget is not None and size > budget:
        raise DataError(f"the hidden states need {spell(size)} ({each}), the budget is {spell(budget)}; {smaller}")
    stored = HiddenStates(prepared.directory / DIRECTORY, spec, lengths)
    left = sum(lengths[i] for number in stored.missing() for i in stored.shards[number]) * spec.bytes_per_token
    free = shutil.disk_usage(prepared.directory).free
    if left > free:
        raise DataError(
            f"the hidden states need {spell(size)} ({each}), {spell(left)} of that still to be written, and "
            f"{prepared.directory} has {spell(free)} left; make room, or {smaller}"
        )
    return size


def extract(
    prepared: Prepared,
    read: Reader,
    spec: HiddenSpec,
    part: tuple[int, int] = (0, 1),
    progress: Callable[[int], None] = lambda tokens: None,
) -> Extracted:
    """Write the missing hidden states.

    Args:
        read: reader, `run_here` or servers.
        spec: result of `spec_of`.
        part: number of this process and count of processes; each writes every count-th shard.
        progress: called with the number of tokens of every sample.

    Raises:
        DataError: the directory contains other hidden states, the disk is full, or states are not finite.
    """
    directory = prepared.directory / DIRECTORY
    make_directory(directory)
    claim(directory, spec)
    lengths = prepared.lengths()
    stored = HiddenStates(directory, spec, lengths)
    number, count = part
    own = range(number, len(stored.shards), count)
    written = 0
    for shard in own:
        if not stored.has(shard):
            claim(directory, spec)  # another process may have started at the same time with other settings
            _write(prepared, read, spec, (stored.file(shard), stored.shards[shard]), progress)
            written += 1
    return Extracted(written, len(own), len(stored.missing()))


def _write(
    prepared: Prepared, read: Reader, spec: HiddenSpec, shard: tuple[Path, range], progress: Callable[[int], None]
) -> None:
    file, samples = shard
    discard_parts(file)
    whole = _concatenated(list(_encoded(prepared, read, spec, samples, progress)))
    write_stamp(file, write_tensors(file, whole))


def _encoded(
    prepared: Prepared, read: Reader, spec: HiddenSpec, samples: range, progress: Callable[[int], None]
) -> Iterator[dict[str, Tensor]]:
    names, tokens, _ = zip(*(prepared[sample] for sample in samples), strict=True)
    for name, sample, states in zip(names, tokens, read(tokens), strict=True):
        try:
            yield {key: value.cpu() for key, value in encode(states, spec.dtype).items()}
        except DataError as error:
            raise DataError(f"conversation {name}: {error}") from error
        progress(len(sample))


def _concatenated(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    # torch concatenates bytes, but not float8
    def joined(name: str) -> Tensor:
        dtype = parts[0][name].dtype
        return torch.cat([part[name].contiguous().view(torch.uint8) for part in parts]).view(dtype)

    return {name: joined(name) for name in parts[0]}


def spell(size: int) -> str:
    """Text of a size in bytes, with decimal prefixes."""
    number, units = float(size), ["bytes", "kB", "MB", "GB", "TB"]
    while number >= 1000 and len(units) > 1:
        number /= 1000
        units.pop(0)
    return f"{number:.0f} bytes" if units[0] == "bytes" else f"{number:.1f} {units[0]}"
