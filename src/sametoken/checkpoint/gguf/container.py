"""Container of a GGUF file: metadata, and the place of each tensor, independent of models.

Every length is compared with the rest of the file before it is used, so that a damaged file costs no memory.
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

from sametoken.checkpoint.gguf.parts import check_parts, part_files
from sametoken.checkpoint.mapped import mapped
from sametoken.errors import CheckpointError, UnsupportedModelError, shown

MAGIC, VERSIONS = b"GGUF", (2, 3)
STRING, ARRAY = 8, 9
# Number types of metadata, in struct's letters.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
MOST_DIMENSIONS = 4
AGAIN = "download it again, or copy it again from where it is whole"


class BlockType(NamedTuple):
    """Storage type of the numbers of a row.

    Attributes:
        name: llama.cpp's name.
        numbers: values per block.
        bytes: bytes per block.
    """

    name: str
    numbers: int
    bytes: int


TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    20: BlockType("IQ4_NL", 32, 18),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: BlockType("IQ4_XS", 256, 136),
    29: BlockType("IQ1_M", 256, 56),
    30: BlockType("BF16", 1, 2),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    39: BlockType("MXFP4", 32, 17),
    40: BlockType("NVFP4", 64, 36),
}
OTHERS = {
    4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 31: "Q4_0_4_4",
    32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 41: "Q1_0", 42: "Q2_0",
}  # fmt: skip


class Entry(NamedTuple):
    """Tensor of a file.

    Attributes:
        shape: outermost dimension first, as in torch.
        type: storage type.
        start: offset of the data from the start of the file, in bytes.
        file: file that has the data.
    """

    shape: tuple[int, ...]
    type: BlockType
    start: int
    file: Path

    @property
    def nbytes(self) -> int:
        rows = 1
        for size in self.shape[:-1]:
            rows *= size
        return rows * self.shape[-1] // self.type.numbers * self.type.bytes


@dataclass(frozen=True)
class Container:
    """GGUF file, or model in several files, without the data.

    Attributes:
        file: first file.
        metadata: values by key.
        entries: tensors by name, in the order of the file.
        data: false if `read` returns tensors on the meta device.
    """

    file: Path
    metadata: Mapping[str, Any]
    entries: Mapping[str, Entry]
    data: bool = True

    def read(self, name: str) -> Tensor:
        """Read the bytes of a tensor, uint8 [rows, bytes of a row]."""
        entry = self.entries[name]
        row = entry.shape[-1] // entry.type.numbers * entry.type.bytes
        if not self.data:
            return torch.empty(entry.nbytes // row, row, dtype=torch.uint8, device="meta")
        try:
            return mapped(entry.file, entry.start, (entry.nbytes // row, row), torch.uint8)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{entry.file}: ends within {name}; {AGAIN}") from error


class _Bytes:
    """Reader of the bytes of a file from its start on; raises CheckpointError at the end of the file."""

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
        return self._texts(count)

    def _texts(self, count: int) -> list[str]:
        """Read `count` texts; the loop has few calls, since a vocabulary has hundreds of thousands of texts."""
        data, at, end, size_of = self.data, self.at, len(self.data), struct.Struct("<Q").unpack_from
        found = []
        for _ in range(count):
            if end - at < 8:
                break
            (size,) = size_of(data, at)
            at += 8 + size
            if at > end:
                break
            found.append(data[at - size : at].decode("utf-8", "replace"))
        if len(found) < count:
            raise self.bad(f"a list of {count} texts, of which {len(found)} are whole,")
        self.at = at
        return found


def read_container(file: Path) -> Container:
    """Read metadata and tensor entries of a GGUF file, or of all parts of a model of which one is given.

    Raises:
        CheckpointError: the file is no GGUF file, truncated or damaged, or a part of the model is missing or foreign.
        UnsupportedModelError: the storage type of a tensor is not implemented.
    """
    files = part_files(file)
    parts = [_read_file(each) for each in files]
    check_parts(files, [part.metadata for part in parts], [part.entries for part in parts])
    entries = {name: entry for part in parts for name, entry in part.entries.items()}
    return Container(files[0], parts[0].metadata, entries)


def _read_file(file: Path) -> Container:
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
        if key in metadata:
            raise data.bad(f"a second value of {shown(key)}")
        metadata[key] = data.value(data.number("I"))
    stated = [_entry(file, data) for _ in range(tensors)]
    alignment = metadata.get("general.alignment", 32)
    if isinstance(alignment, bool) or not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
        raise data.bad(f"an alignment of {shown(alignment)}")
    start = data.at + -data.at % alignment
    entries = {name: entry._replace(start=start + entry.start) for name, entry in stated}
    if len(entries) < len(stated):
        raise data.bad(f"{len(stated) - len(entries)} names of tensors are there twice")
    _check_places(file, entries, len(data.data))
    return Container(file, metadata, entries)


def _check_places(file: Path, entries: Mapping[str, Entry], size: int) -> None:
    """Raise CheckpointError if tensors overlap, or end beyond the file."""
    before, end = "", 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].start):
        if entry.start < end:
            words = f"{shown(name)} begins at byte {entry.start}, within {shown(before)}, which ends at byte {end}"
            raise CheckpointError(f"{file}: damaged: {words}; {AGAIN}")
        before, end = name, entry.start + entry.nbytes
    if end > size:
        raise CheckpointError(f"{file}: truncated: {before} ends at byte {end}, the file has {size}; {AGAIN}")


def _entry(file: Path, data: _Bytes) -> tuple[str, Entry]:
    name, dimensions = data.text(), data.number("I")
    if not 0 < dimensions <= MOST_DIMENSIONS:
        raise data.bad(f"{shown(name)} with {dimensions} dimensions")
    shape = tuple(data.number("Q") for _ in range(dimensions))[::-1]
    kind, start = data.number("I"), data.number("Q")
    if kind not in TYPES:
        stored, becomes = OTHERS.get(kind, f"type {kind}"), _in_q4_k_m(shape[-1])
        advice = f"llama-quantize --allow-requantize {file.name} NEW Q4_K_M makes it {becomes}, at some loss"
        words = f"{name} is stored as {stored}, which is not supported; {advice}; or download a file of another kind"
        raise UnsupportedModelError(f"{file}: {words}")
    if min(shape) < 1 or max(shape) > 1 << 32 or shape[-1] % TYPES[kind].numbers:
        raise data.bad(f"{name} has shape {list(shape)}, expected rows of whole blocks of {TYPES[kind].numbers}")
    return name, Entry(shape, TYPES[kind], start, file)


def _in_q4_k_m(inputs: int) -> str:
    """Types that llama-quantize chooses for rows of `inputs` numbers in Q4_K_M, the second for sensitive tensors."""
    return "Q4_K or Q6_K" if inputs % 256 == 0 else "Q5_0 or Q8_0" if inputs % 32 == 0 else "F16"
