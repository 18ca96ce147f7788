"""Tensors of a safetensors file on the meta device, from its header; messages for weight files that are damaged."""

from __future__ import annotations

import errno
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sametoken.checkpoint.gguf.container import AGAIN
from sametoken.errors import CheckpointError, UnsupportedModelError, shown

# By their names in safetensors.
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
}  # fmt: skip
MOST_HEADER = 100_000_000  # bytes, safetensors' own limit


class StoredPlace(NamedTuple):
    """Tensor of a safetensors file.

    Attributes:
        name: name in the file.
        tensor: shape and dtype, on the meta device.
        start: offset of the data from the start of the file, in bytes.
    """

    name: str
    tensor: Tensor
    start: int


def safetensors_header(file: Path) -> list[StoredPlace]:
    """Tensors of a safetensors file in the order of their data, which may be missing.

    Raises:
        CheckpointError: the header is truncated or damaged.
        UnsupportedModelError: a tensor has a dtype that torch does not have.
    """
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(length)) if length <= MOST_HEADER else None
    except (OSError, ValueError, RecursionError, struct.error) as error:
        raise CheckpointError(damaged(file, error), field=str(file)) from error
    if not isinstance(header, dict):
        raise CheckpointError(damaged(file, ValueError("no header of a safetensors file")), field=str(file))
    stated = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
    try:
        stated.sort(key=lambda item: item[1]["data_offsets"])
        return [
            StoredPlace(name, _stated_tensor(name, entry, file), 8 + length + entry["data_offsets"][0])
            for name, entry in stated
        ]
    except (KeyError, TypeError, RuntimeError, IndexError) as error:
        raise CheckpointError(damaged(file, error), field=str(file)) from error


def _stated_tensor(name: str, entry: Mapping[str, Any], file: Path) -> Tensor:
    if entry["dtype"] not in DTYPES:
        raise UnsupportedModelError(f"{name} holds {shown(entry['dtype'])}, which is not supported", field=str(file))
    return torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]], device="meta")


def damaged(file: Path, error: Exception) -> str:
    """Error message for a weight file that cannot be read, with a remedy."""
    if isinstance(error, OSError) and error.errno != errno.EINVAL:  # torch seeks before the start of a truncated file
        return f"cannot be read ({error.strerror or error}); check its permissions, or {AGAIN}"
    with file.open("rb") as opened:
        head = opened.read(40)
    if head.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the weights; run `git lfs pull` in its repository"
    reason = str(error).splitlines()[0]
    return f"truncated or damaged ({file.stat().st_size} bytes: {reason}); {AGAIN}"
