"""Directory of a head before its weights are read: config.json and the headers of the weight files.

Medusa heads may have weight files with other names than usual (FasterDecoding).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sametoken.checkpoint.contents import of_directory
from sametoken.checkpoint.hub import read_json
from sametoken.checkpoint.load import read_weights
from sametoken.checkpoint.tensors import WEIGHT_FILES
from sametoken.errors import CheckpointError
from sametoken.model.formats.coded import Coded

HEAD_FILES = (*WEIGHT_FILES, "medusa_lm_head.safetensors", "medusa_lm_head.pt")


class Seen(NamedTuple):
    """Shape and dtype of a tensor from the header of a file; for a quantised weight, of the dequantised one."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Files:
    """Content of config.json and of the weight files' headers.

    Attributes:
        where: directory of the head.
        config: content of config.json.
        seen: tensors by stored name; a quantised weight is one tensor, named like a plain one.
    """

    where: Path
    config: Mapping[str, Any]
    seen: Mapping[str, Seen]

    @classmethod
    def of(cls, directory: Path, *, weights: bool = True) -> Files:
        """Read config.json and, unless `weights` is false, the headers of the weight files.

        Raises:
            CheckpointError: one of them is missing or damaged.
            UnsupportedModelError: the weights are quantised to a format that is not implemented.
        """
        config = read_json(directory / "config.json")
        if config is None:
            raise CheckpointError(f"{directory} has no config.json, expected a head: {of_directory(directory)}")
        return cls(directory, config, _seen(directory) if weights else {})


def _seen(directory: Path) -> dict[str, Seen]:
    with torch.device("meta"):
        return {
            name: Seen(tuple(tensor.shape), torch.float32 if isinstance(tensor, Coded) else tensor.dtype)
            for name, tensor, _ in read_weights(directory, names=HEAD_FILES, data=False)
        }


def mapping(value: Any) -> Mapping[str, Any]:
    """`value` if it is an object, else an empty one."""
    return value if isinstance(value, Mapping) else {}
