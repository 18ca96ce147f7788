"""Writer of the safetensors files of a Hugging Face checkpoint, with one shard at a time in memory."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

SHARD_BYTES = 2 << 30
WEIGHTS = "model.safetensors"


class Shards:
    """Writer of weight files into a directory that no process reads yet.

    Args:
        directory: existing directory without weights.
        most: limit of a shard in bytes, unless one tensor is larger.
    """

    def __init__(self, directory: Path, most: int = SHARD_BYTES) -> None:
        self._directory, self._most = directory, most
        self._waiting: dict[str, Tensor] = {}
        self._files: list[list[str]] = []  # names in each written shard
        self.size = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor, and write the shard when it is full; may raise OSError or SafetensorError."""
        if self._waiting and sum(each.nbytes for each in self._waiting.values()) + tensor.nbytes > self._most:
            self._write()
        self._waiting[name] = tensor.contiguous()
        self.size += tensor.nbytes

    def finish(self) -> None:
        """Write the last shard, rename the shards, and write their index if there are several."""
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
        part.chmod(mode)  # safetensors writes files that only the owner can read
        self._files.append(list(self._waiting))
        self._waiting = {}
