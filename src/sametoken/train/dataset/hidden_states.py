"""Stored hidden states of prepared samples: format, size and reading.

A directory `hidden` next to the samples contains manifest.json, and per shard a safetensors file with its stamp as
JSON. A shard is complete when its stamp exists. Legend: T tokens of a shard, S of a sample, n taps, H hidden size.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sametoken.errors import DataError
from sametoken.files import PREPARE_AGAIN, Stamp, check, dataclass_of, read_object, write_json
from sametoken.learning.target import Features

DIRECTORY, MANIFEST = "hidden", "manifest.json"
FORMAT = 1
SHARD_BYTES = 256 << 20
DTYPES = ("bfloat16", "fp8")
LARGEST = torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True)
class HiddenSpec:
    """Specification of hidden states; two runs with equal specifications write equal shards.

    Attributes:
        format: version of this layout.
        target: name of the model.
        target_digest: `checkpoint.identity.model_digest` of the model.
        tokenizer_digest: digest of the tokenizer and the chat template.
        samples_sha256: digest of the samples' file.
        taps: 0-based blocks whose outputs are stored, in addition to the last state.
        hidden_size: H.
        dtype: one of DTYPES; fp8 is e4m3 with a float32 scale per token and tap.
        computed_in: torch name of the dtype in which the target ran.
        shard_bytes: size limit of a shard, exceeded only by a single larger sample.
    """

    format: int
    target: str
    target_digest: str
    tokenizer_digest: str
    samples_sha256: str
    taps: tuple[int, ...]
    hidden_size: int
    dtype: str
    computed_in: str
    shard_bytes: int = SHARD_BYTES

    @property
    def bytes_per_token(self) -> int:
        """Stored size of a token: all taps and the last state."""
        groups = len(self.taps) + 1
        return groups * (self.hidden_size + 4 if self.dtype == "fp8" else 2 * self.hidden_size)

    def shards(self, lengths: Sequence[int]) -> list[range]:
        """Samples of each shard, in order."""
        starts, held = [0], 0
        for sample, length in enumerate(lengths):
            if held and (held + length) * self.bytes_per_token > self.shard_bytes:
                starts.append(sample)
                held = 0
            held += length
        return [range(a, b) for a, b in zip(starts, [*starts[1:], len(lengths)], strict=True)]


def encode(states: Tensor, dtype: str) -> dict[str, Tensor]:
    """Stored form of hidden states [T, n + 1, H].

    Raises:
        DataError: they are not finite.
    """
    if not states.isfinite().all():
        raise DataError("the target's hidden states hold NaN or Inf; run it in a wider dtype (--dtype float32)")
    if dtype == "bfloat16":
        return {"states": states.to(torch.bfloat16).contiguous()}
    wide = states.float()
    scales = (wide.abs().amax(-1) / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    return {"states": (wide / scales.unsqueeze(-1)).to(torch.float8_e4m3fn), "scales": scales}


def decode(stored: dict[str, Tensor]) -> Tensor:
    """Hidden states [T, n + 1, H] in bfloat16 from the result of `encode`."""
    if "scales" not in stored:
        return stored["states"]
    return (stored["states"].float() * stored["scales"].unsqueeze(-1)).to(torch.bfloat16)


class StoredStates(Protocol):
    """Hidden states of samples on disk."""

    @property
    def taps(self) -> tuple[int, ...]:
        """0-based blocks whose outputs are stored, in addition to the last state."""

    def __getitem__(self, sample: int) -> Features:
        """Read a sample. Raises DataError if its file is missing or damaged."""


class HiddenStates:
    """Stored hidden states, read sample by sample; the digest of a shard is checked at its first use.

    Args:
        directory: directory of the manifest and the shards.
        lengths: number of tokens of each sample.
    """

    def __init__(self, directory: Path, spec: HiddenSpec, lengths: Sequence[int]) -> None:
        self._directory, self.spec = directory, spec
        self.shards = spec.shards(lengths)
        self._starts = [shard.start for shard in self.shards]
        self._offsets = list(accumulate(lengths))
        self._checked: set[int] = set()

    @staticmethod
    def open(directory: Path, lengths: Sequence[int]) -> HiddenStates | None:
        """Open the hidden states in a directory; None if there are none.

        Raises:
            DataError: the manifest is damaged or of another version.
        """
        if not (directory / MANIFEST).exists():
            return None
        return HiddenStates(directory, read_spec(directory / MANIFEST), lengths)

    @property
    def taps(self) -> tuple[int, ...]:
        """0-based blocks whose outputs are stored, in addition to the last state."""
        return self.spec.taps

    def __getitem__(self, sample: int) -> Features:
        """Read a sample. Raises DataError if its shard is missing or damaged."""
        number = bisect_right(self._starts, sample) - 1
        file = self._whole(number)
        offsets = [0, *self._offsets]
        base, start, stop = offsets[self._starts[number]], offsets[sample], offsets[sample + 1]
        try:
            with safe_open(file, framework="pt") as opened:
                stored = {name: opened.get_slice(name)[start - base : stop - base] for name in opened.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise DataError(f"{file}: not readable as safetensors ({error}); {PREPARE_AGAIN}") from error
        states = decode(stored)
        return Features(states[:, :-1].flatten(1), states[:, -1])

    def file(self, number: int) -> Path:
        """Path of a shard, which may not exist."""
        return self._directory / f"shard-{number:05d}.safetensors"

    def has(self, number: int) -> bool:
        """True if a shard was written completely; it may have been damaged since."""
        return _stamp_file(self.file(number)).exists()

    def missing(self) -> list[int]:
        """Numbers of the shards that were not written yet."""
        return [number for number in range(len(self.shards)) if not self.has(number)]

    def _whole(self, number: int) -> Path:
        file = self.file(number)
        if number in self._checked:
            return file
        if not self.has(number):
            raise DataError(
                f"{file} is missing: {len(self.missing())} of {len(self.shards)} shards were not written; "
                "run `sametoken prepare --hidden-states` again to write them"
            )
        check(file, read_stamp(file))
        self._checked.add(number)
        return file


def read_spec(file: Path) -> HiddenSpec:
    """Read the manifest of hidden states.

    Raises:
        DataError: the manifest is damaged or of another version.
    """
    found = read_object(file)
    try:
        spec = dataclass_of(HiddenSpec, {**found, "taps": tuple(found["taps"])})
    except (TypeError, KeyError) as error:
        raise DataError(f"{file}: not a manifest of hidden states ({error}); {PREPARE_AGAIN}") from error
    if spec.format != FORMAT:
        raise DataError(f"{file}: format {spec.format}, expected {FORMAT}; {PREPARE_AGAIN}")
    return spec


def claim(directory: Path, spec: HiddenSpec) -> None:
    """Write the specification of a directory's hidden states, or check it against the existing one.

    Raises:
        DataError: the directory contains other hidden states; the message has the first difference.
    """
    file = directory / MANIFEST
    if not file.exists():
        write_json(file, asdict(spec))
        return
    found, expected = asdict(read_spec(file)), asdict(spec)
    for key in expected.keys() - {"target"}:  # a name may change, the model may not
        if found[key] != expected[key]:
            raise DataError(
                f"{file}: found {key} {_shown(found[key])}, expected {_shown(expected[key])}; "
                f"delete {directory} to make the hidden states anew, or run with the settings that made them"
            )


def write_stamp(file: Path, stamp: Stamp) -> None:
    """Mark a shard as complete; call after writing the shard."""
    write_json(_stamp_file(file), stamp._asdict())


def read_stamp(file: Path) -> Stamp:
    """Expected size and digest of a shard. Raises DataError if the stamp is damaged."""
    found = read_object(_stamp_file(file))
    try:
        return Stamp(int(found["bytes"]), str(found["sha256"]))
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{_stamp_file(file)}: not a stamp ({error}); {PREPARE_AGAIN}") from error


def _stamp_file(file: Path) -> Path:
    return file.with_suffix(".json")


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
