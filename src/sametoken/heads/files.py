"""A head's directory before its data are read: its config.json and what its weight files say of themselves.

Beside the usual names, Medusa heads live in files of their own (FasterDecoding).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sametoken.checkpoint.contents import of_directory
from sametoken.checkpoint.hub import read_json
from sametoken.checkpoint.tensors import WEIGHT_FILES, Seen, seen_tensors
from sametoken.errors import CheckpointError

HEAD_FILES = (*WEIGHT_FILES, "medusa_lm_head.safetensors", "medusa_lm_head.pt")


@dataclass(frozen=True)
class Files:
    """What is known of a head without its data.

    Attributes:
        where: its directory.
        config: config.json.
        seen: its tensors under their own names.
    """

    where: Path
    config: Mapping[str, Any]
    seen: Mapping[str, Seen]

    @classmethod
    def of(cls, directory: Path, *, weights: bool = True) -> Files:
        """Reads config.json and, unless `weights` is false, the headers of the weight files.

        Raises:
            CheckpointError: one of them is missing or damaged.
        """
        config = read_json(directory / "config.json")
        if config is None:
            raise CheckpointError(f"{directory} has no config.json, expected a head: {of_directory(directory)}")
        return cls(directory, config, seen_tensors(directory, HEAD_FILES) if weights else {})


def mapping(value: Any) -> Mapping[str, Any]:
    """`value` if it is an object, else an empty one."""
    return value if isinstance(value, Mapping) else {}
