"""The container of a GGUF file: metadata and where each tensor lies. Knows nothing of models.

Every length is compared with what the file still holds before it is used, so that a damaged file costs no memory.
Source: ggml's docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sametoken.checkpoint.mapped import mapped
from sametoken.errors import CheckpointError, UnsupportedModelError, shown

MAGIC, VERSIONS = b"GGUF", (2, 3)
STRING, ARRAY = 8, 9
# Types of metadata by number, in struct's letters.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
MOST_DIMENSIONS = 4
AGAIN = "download it again, or copy it again from where it is whole"


class BlockType(NamedTuple):
    """How numbers of a row are stored.

    Attributes:
        name: what llama.cpp calls it.
        numbers: of a block.
        bytes: of a block.
    """

    name: str
    numbers: int
    bytes: int


TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    8: BlockType("Q8_0", 32, 34),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    30: BlockType("BF16", 1, 2),
    39: BlockType("MXFP4", 32, 17),
}
OTHERS = {
    3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS",
    18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32",
    27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4",
}  # fmt: skip


class Entry(NamedTuple):
    """A tensor of the file.

    Attributes:
        shape: outermost dimension first, as torch has it.
        type: how its numbers are stored.
        start: of its data, in bytes from the start of the file.
    """

    shape: tuple[int, ...]
    type: BlockType
    start: int

    @property
    def nbytes(self) -> int:
        rows = 1
        for size in self.shape[:-1]:
            rows *= size
        return rows * self.shape[-1] // self.type.numbers * self.type.bytes


@dataclass(frozen=True)
class Container:
    """A GGUF file without its data.

    Attributes:
        file: where it lies.
        metadata: values by key.
        entries: tensors by name, in the order of the file.
        data: whether `read` reads; otherwise it gives tensors on the meta device.
    """

    file: Path
    metadata: Mapping[str, Any]
    entries: Mapping[str, Entry]
    data: bool = True

    def read(self, name: str) -> Tensor:
        """The bytes of a tensor, uint8 [rows, bytes of a row]."""
        entry = self.entries[name]
        row = entry.shape[-1] // entry.type.numbers * entry.type.bytes
        if not self.data:
            return torch.empty(entry.nbytes // row, row, dtype=torch.uint8, device="meta")
        try:
            with self.file.open("rb") as opened:
                return mapped(opened, entry.start, (entry.nbytes // row, row), torch.uint8)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.file}: ends within {name}; {AGAIN}") from error


class _Bytes:
    """The bytes of a file from its start on; whatever would lie past its end is an error."""

    def __init__(self, file: Path, data: mmap.mmap) -> None:
        self.file, self.data, self.at = file, data, 0

    def bad(self, words: str) -> CheckpointError:
        return CheckpointError(f"{self.file}: not a whole GGUF file: {words} at byte {self.at}; {AGAIN}")

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.at:
            raise self.bad(f"{size} bytes are stated and {len(self.data) - self.at} are left")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, letter: str) -> Any:
        return struct.unpack("<" + letter, self.take(struct.calcsize("<" + letter)))[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind in NUMBERS:
            return self.number(NUMBERS[kind])
        if kind != ARRAY:
            raise self.bad(f"a value of the unknown type {kind}")
        inner, count = self.number("I"), self.number("Q")
        if inner in NUMBERS:
            letter = NUMBERS[inner]
            if count > len(self.data):
                raise self.bad(f"a list of {count} values")
            return list(struct.unpack(f"<{count}{letter}", self.take(count * struct.calcsize(letter))))
        if inner != STRING:
            raise self.bad(f"a list of values of type {inner}")
        if count * 8 > len(self.data) - self.at:
            raise self.bad(f"a list of {count} texts")
        return [self.text() for _ in range(count)]


def read_container(file: Path) -> Container:
    """Metadata and tensors of a GGUF file.

    Raises:
        CheckpointError: it is no GGUF file, or truncated or damaged.
        UnsupportedModelError: it is one part of several, or a tensor is stored in a way that is not implemented.
    """
    try:
        if file.stat().st_size < 24:
            raise CheckpointError(f"{file}: {file.stat().st_size} bytes are no GGUF file; {AGAIN}")
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            return _read(file, _Bytes(file, mapped))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror}); check its permissions") from error


def _read(file: Path, data: _Bytes) -> Container:
    magic, version = data.take(4), data.number("I")
    if magic != MAGIC:
        raise CheckpointError(f"{file}: begins with {magic!r}, expected {MAGIC!r}: this is no GGUF file")
    if version not in VERSIONS:
        raise UnsupportedModelError(f"{file}: GGUF of version {shown(version)}, expected 2 or 3 in little endian")
    tensors, keys = data.number("Q"), data.number("Q")
    if max(tensors, keys) > len(data.data) // 12:
        raise data.bad(f"{tensors} tensors and {keys} keys are stated")
    metadata: dict[str, Any] = {}
    for _ in range(keys):
        key = data.text()
        metadata[key] = data.value(data.number("I"))
    parts = metadata.get("split.count", 0)
    if not isinstance(parts, int):
        raise data.bad(f"split.count is {shown(parts)}, expected a number")
    if parts > 1:
        raise UnsupportedModelError(
            f"{file}: one of {parts} parts of a model, expected a single file; join them with llama-gguf-split --merge"
        )
    stated = [_entry(file, data) for _ in range(tensors)]
    alignment = metadata.get("general.alignment", 32)
    if isinstance(alignment, bool) or not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
        raise data.bad(f"an alignment of {shown(alignment)}")
    start = data.at + -data.at % alignment
    entries = {name: entry._replace(start=start + entry.start) for name, entry in stated}
    for name, entry in entries.items():
        if entry.start + entry.nbytes > len(data.data):
            raise CheckpointError(
                f"{file}: truncated: {name} ends at byte {entry.start + entry.nbytes}, the file has {len(data.data)}; "
                f"{AGAIN}"
            )
    return Container(file, metadata, entries)


def _entry(file: Path, data: _Bytes) -> tuple[str, Entry]:
    name, dimensions = data.text(), data.number("I")
    if not 0 < dimensions <= MOST_DIMENSIONS:
        raise data.bad(f"{shown(name)} with {dimensions} dimensions")
    shape = tuple(data.number("Q") for _ in range(dimensions))[::-1]
    kind, start = data.number("I"), data.number("Q")
    if kind not in TYPES:
        words = OTHERS.get(kind, f"of type {kind}")
        raise UnsupportedModelError(
            f"{file}: {name} is stored as {words}, which is not supported; use a file with "
            f"{', '.join(each.name for each in TYPES.values())}, for example Q4_K_M or Q8_0"
        )
    if min(shape) < 1 or max(shape) > 1 << 32 or shape[-1] % TYPES[kind].numbers:
        raise data.bad(f"{name} has shape {list(shape)}, expected rows of whole blocks of {TYPES[kind].numbers}")
    return name, Entry(shape, TYPES[kind], start)
