"""Packed weights of a decoder, in the layout of the compiled kernels, in a safetensors file that is mapped.

Tensors lie at multiples of 64 bytes. A second file, `FACTS`, has the format of each weight, a digest of these formats
and of the first file's header, and the time when the first file was written, so that a damaged or changed entry is
found without reading its data.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sametoken.checkpoint.headers import DTYPES, safetensors_header
from sametoken.files import json_object, write_json
from sametoken.kernels.cpu.library import PackedWeight
from sametoken.kernels.cpu.memory import read_ahead
from sametoken.model.decoder import Decoder
from sametoken.model.formats.coded_packing import restored, stored_parts
from sametoken.model.linear import Embedding, Linear

FILE, FACTS = "weights.safetensors", "entry.json"
ALIGNMENT = 64  # bytes of a cache line
PIECE = 64 << 20  # bytes of one write
SAME_NS = 1 << 30  # tolerance of times, about a second: some archives and file systems keep whole seconds
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_packed(decoder: Decoder, place: Path, version: int) -> None:
    """Write the two files of a decoder on the CPU into the directory `place`; may raise OSError."""
    weights = dict(_packed(decoder))
    tensors = {
        f"{name}/{part}": each for name, packed in weights.items() for part, each in stored_parts(packed).items()
    }
    own = {each.data_ptr() for each in tensors.values()}
    tensors |= {name: each.detach() for name, each in decoder.named_parameters() if each.data_ptr() not in own}
    header = _write(tensors, place / FILE)
    fields = ("format", "inputs", "outputs", "group")
    stated = {name: [getattr(packed.weight, field) for field in fields] for name, packed in weights.items()}
    size = sum(each.nbytes for each in tensors.values())
    facts = {"bytes": size, "changed": (place / FILE).stat().st_mtime_ns, "digest": _digest(header, stated, version)}
    write_json(place / FACTS, {**facts, "weights": stated})


def packed_bytes(decoder: Decoder) -> int:
    """Size in bytes of the files that `write_packed` writes, without their headers."""
    packed = sum(each.nbytes for _, each in _packed(decoder))
    return packed + sum(each.nbytes for each in decoder.parameters())


def read_packed(decoder: Decoder, place: Path, version: int) -> None:
    """Fill a decoder on the meta device with the weights that `write_packed` wrote.

    Raises:
        CheckpointError, OSError, ValueError, KeyError, TypeError: the files are damaged or of another decoder.
    """
    file, facts = place / FILE, json_object(place / FACTS)
    stated: Mapping[str, Any] = facts["weights"]
    if abs(file.stat().st_mtime_ns - facts["changed"]) > SAME_NS:
        raise ValueError("it was changed after it was written")
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        if facts["digest"] != _digest(opened.read(min(length, file.stat().st_size)), stated, version):
            raise ValueError("its header is not the one that was written")
        # Copy-on-write pages, since torch has no read-only tensors; no code writes to them.
        pages = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    read_ahead(pages)
    parts: dict[str, dict[str, Tensor]] = {}
    for name, shape, start in safetensors_header(file):
        if start + shape.nbytes > len(pages):
            raise ValueError("it ends before its data do")
        owner, _, part = name.partition("/")
        found = torch.frombuffer(pages, dtype=torch.uint8, count=shape.nbytes, offset=start)
        parts.setdefault(owner, {})[part] = found.view(shape.dtype).view(shape.shape)
    for name, (kind, inputs, outputs, group) in stated.items():
        _place(decoder, name, restored(kind, (outputs, inputs), group, parts.pop(name)))
    for name, plain in parts.items():
        owner, _, own = name.rpartition(".")
        setattr(decoder.get_submodule(owner), own, nn.Parameter(plain[""], requires_grad=False))
    if left := [name for name, each in decoder.named_parameters() if each.is_meta]:
        raise ValueError(f"it lacks {left[0]}")
    for module in decoder.modules():
        if isinstance(module, Linear | Embedding):
            module.pack()


def _packed(decoder: Decoder) -> Iterator[tuple[str, PackedWeight]]:
    """Iterate over packed weights by module name; an embedding with a tied head comes once."""
    for name, module in decoder.named_modules():
        if isinstance(module, Embedding) and module.table is not None:
            yield name, module.table
        elif isinstance(module, Linear) and module.native is not None:
            owner = decoder.get_submodule(name.rpartition(".")[0])
            if not isinstance(owner, Embedding) or owner.table is None:
                yield name, module.native


def _place(decoder: Decoder, name: str, packed: PackedWeight) -> None:
    owner = decoder.get_submodule(name.rpartition(".")[0])
    if isinstance(owner, Embedding):  # the head of a tied embedding, a module that `restore` makes
        owner.restore(packed, table=False)
        return
    module = decoder.get_submodule(name)
    if isinstance(module, Embedding):
        module.restore(packed, table=True)
    elif isinstance(module, Linear):
        module.restore(packed)
    else:
        raise TypeError(f"{name} has no weight")


def _write(tensors: Mapping[str, Tensor], file: Path) -> bytes:
    """Write a safetensors file and return its header; tensors with a size off `ALIGNMENT` come last."""
    ordered = sorted(tensors.items(), key=lambda item: (item[1].nbytes % ALIGNMENT > 0, -item[1].element_size()))
    entries, end = {}, 0
    for name, tensor in ordered:
        offsets = [end, end := end + tensor.nbytes]
        entries[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
    header = json.dumps(entries).encode()
    header += b" " * (-(8 + len(header)) % ALIGNMENT)
    with file.open("wb") as opened:
        opened.write(struct.pack("<Q", len(header)) + header)
        for _, tensor in ordered:
            data = memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
            for first in range(0, len(data), PIECE):
                opened.write(data[first : first + PIECE])
    return header


def _digest(header: bytes, stated: Mapping[str, Any], version: int) -> str:
    return hashlib.sha256(header + json.dumps([version, stated], sort_keys=True).encode()).hexdigest()
