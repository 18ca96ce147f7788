"""Weight files of a checkpoint directory, and their tensors under the names in the files.

Memory holds at most one tensor at a time. Sources of the layouts: the safetensors format, and the `*.index.json` files
of Hugging Face repositories.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sametoken.checkpoint.contents import NAMES_SHOWN, of_directory
from sametoken.checkpoint.gguf import LINK
from sametoken.checkpoint.gguf.container import AGAIN
from sametoken.checkpoint.gguf.directory import read_gguf
from sametoken.checkpoint.gguf.parts import part_files
from sametoken.checkpoint.headers import damaged, safetensors_header
from sametoken.checkpoint.mapped import mapped
from sametoken.errors import CheckpointError, shown
from sametoken.files import check_regular, json_object
from sametoken.model.formats.coded import Coded

INDEX = "model.safetensors.index.json"
WEIGHT_FILES = (
    INDEX,
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
    LINK,
)
FILE_NAME = re.compile(r"(?!\.)[^/\\\x00]{1,255}")
SHARD = re.compile(rf"{FILE_NAME.pattern}\.(?:safetensors|bin)")


class Stored(NamedTuple):
    """Tensor of a weight file; the data stay on disk until they are read."""

    name: str
    tensor: Tensor
    file: Path


def read_tensors(directory: Path, names: Sequence[str] = WEIGHT_FILES, *, data: bool = True) -> Iterator[Stored]:
    """Yield every tensor of a checkpoint directory, file by file in the order of the data.

    Weights may be in one file, in shards with an index, or in a linked GGUF file.

    Args:
        names: names of weight files; the first that exists is read.
        data: false for tensors on the meta device, from the headers of safetensors files alone.

    Raises:
        CheckpointError: there are no weights, an index names an absent file, or a file is damaged.
    """
    for file in weight_files(directory, names):
        if data:
            yield from READERS[file.suffix](file)
        elif file.suffix == ".safetensors":
            yield from (Stored(name, tensor, file) for name, tensor, _ in safetensors_header(file))
        else:
            yield from (item._replace(tensor=item.tensor.to("meta")) for item in READERS[file.suffix](file))


def absent_tensors(directory: Path) -> list[str]:
    """Tensor names of an index with an absent file; empty if all files exist, or without an index."""
    index = directory / next((name for name in WEIGHT_FILES if (directory / name).exists()), "")
    if index.name != INDEX:
        return []
    stated = _weight_map(index)
    return [] if all(os.path.exists(directory / file) for file in set(stated.values())) else list(stated)


def weight_files(directory: Path, names: Sequence[str] = WEIGHT_FILES) -> list[Path]:
    """Weight files of a checkpoint directory; raise CheckpointError if one is absent."""
    for name in names:
        if (directory / name).exists():
            if name == LINK:
                return [directory / name, *part_files(directory / name)[1:]]
            found = _shards(directory / name) if name.endswith(".json") else [directory / name]
            for file in found:
                _check_regular(file)
            return found
    words = f"no weights, expected one of {', '.join(names)}: {of_directory(directory)}"
    raise CheckpointError(words, field=str(directory))


def _check_regular(file: Path) -> None:
    try:
        check_regular(file)
    except OSError as error:
        raise CheckpointError(damaged(file, error), field=str(file)) from error
    except ValueError as error:
        raise CheckpointError(f"{error}; {AGAIN}", field=str(file)) from error


def _weight_map(index: Path) -> dict[str, str]:
    """File name of each tensor in an index."""
    try:
        stated = json_object(index).get("weight_map")
    except OSError as error:
        words = f"cannot be read ({error.strerror}); check its permissions"
        raise CheckpointError(words, field=str(index)) from error
    except ValueError as error:
        raise CheckpointError(str(error), field=str(index), advice=AGAIN) from error
    if not isinstance(stated, dict):
        words = f"not an index with a weight_map, which is {shown(stated)}"
        raise CheckpointError(words, field=str(index), advice=AGAIN)
    # An index is untrusted: it may name only weight files in its own directory.
    if foreign := [name for name in stated.values() if not isinstance(name, str) or not SHARD.fullmatch(name)]:
        words = f"names {shown(foreign[0])}, expected names of .safetensors or .bin files beside the index"
        raise CheckpointError(words, field=str(index))
    return stated


def _shards(index: Path) -> list[Path]:
    """Files that an index names, sorted; raise CheckpointError if one is absent."""
    names = sorted(set(_weight_map(index).values()))
    if absent := [name for name in names if not os.path.exists(index.parent / name)]:  # raises no error
        raise CheckpointError(
            f"{len(absent)} of {len(names)} files are missing: {', '.join(absent[:NAMES_SHOWN])}; "
            "the download stopped half-way: run it again",
            field=str(index),
        )
    return [index.parent / name for name in names]


def tensor_names(file: Path) -> list[str]:
    """Names of the tensors of a safetensors file, in the order of their data."""
    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.offset_keys())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(damaged(file, error), field=str(file)) from error


def _read_safetensors(file: Path) -> Iterator[Stored]:
    tensor_names(file)  # the library checks the header, and the length of the file
    try:
        for name, tensor, start in safetensors_header(file):
            yield Stored(name, mapped(file, start, tensor.shape, tensor.dtype), file)
    except (OSError, ValueError) as error:
        raise CheckpointError(damaged(file, error), field=str(file)) from error


def _read_bin(file: Path) -> Iterator[Stored]:
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            "holds more than tensors, or is damaged, and was not executed; convert it to safetensors", field=str(file)
        ) from error
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        raise CheckpointError(damaged(file, error), field=str(file)) from error
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in tensors.items()
    ):
        words = "holds something else than a dictionary of tensors by name; convert it to safetensors"
        raise CheckpointError(words, field=str(file))
    for name in tensors:
        yield Stored(name, tensors[name], file)


def _read_gguf(file: Path) -> Iterator[Stored]:
    for name, tensor in read_gguf(file):
        yield Stored(name, tensor.dequantize() if isinstance(tensor, Coded) else tensor, file)


READERS = {".safetensors": _read_safetensors, ".bin": _read_bin, ".pt": _read_bin, ".gguf": _read_gguf}
