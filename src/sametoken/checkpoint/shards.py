"""Tensors as they come into safetensors files of a Hugging Face checkpoint: one shard at a time is in memory."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

SHARD_BYTES = 2 << 30
WEIGHTS = "model.safetensors"


class Shards:
    """The weight files of a directory that nobody reads yet.

    Args:
        directory: is there and empty of weights.
        most: bytes of a shard, unless one tensor has more.
    """

    def __init__(self, directory: Path, most: int = SHARD_BYTES) -> None:
        self._directory, self._most = directory, most
        self._waiting: dict[str, Tensor] = {}
        self._files: list[list[str]] = []  # names in each shard that is written
        self.size = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """A tensor; the shard is written when it is full. Raises OSError or SafetensorError as the files do."""
        if self._waiting and sum(each.nbytes for each in self._waiting.values()) + tensor.nbytes > self._most:
            self._write()
        self._waiting[name] = tensor.contiguous()
        self.size += tensor.nbytes

    def finish(self) -> None:
        """Write what waits, give the shards their names, and write their index if there are several."""
        self._write()
        count = len(self._files)
        names = [WEIGHTS] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        for number, name in enumerate(names):
            self._part(number).replace(self._directory / name)
        if count > 1:
            places = {key: name for name, keys in zip(names, self._files, strict=True) for key in keys}
            index = {"metadata": {"total_size": self.size}, "weight_map": dict(sorted(places.items()))}
            file = self._directory / f"{WEIGHTS}.index.json"
            file.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _part(self, number: int) -> Path:
        return self._directory / f"part-{number}.safetensors"

    def _write(self) -> None:
        part = self._part(len(self._files))
        part.touch()
        mode = part.stat().st_mode
        save_file(self._waiting, part, metadata={"format": "pt"})
        part.chmod(mode)  # safetensors writes files that only their owner can read
        self._files.append(list(self._waiting))
        self._waiting = {}
