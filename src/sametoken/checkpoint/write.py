"""Writer of checkpoint directories: a decoder as a Hugging Face checkpoint, config.json with any weights, or shards."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from sametoken.checkpoint.experts import TURNED, joined_experts
from sametoken.checkpoint.hub import SMALL_FILES
from sametoken.checkpoint.mapping import rules_for
from sametoken.errors import CheckpointError
from sametoken.model.decoder import Decoder

SHARD_BYTES = 2 << 30
CONFIG, WEIGHTS = "config.json", "model.safetensors"
BEING_WRITTEN = ".written-"  # prefix of a directory that is being written
TOKENIZER = tuple(pattern for pattern in SMALL_FILES if "config.json" not in pattern)


def write_model(
    decoder: Decoder, directory: Path, config: Mapping[str, Any], tokenizer: Path, dtype: torch.dtype
) -> None:
    """Write a model that transformers and the engine load.

    Args:
        decoder: decoder with plain, unpacked linears.
        directory: new directory, or one with no other files than those that are written.
        config: config.json of the decoder, without the dtype.
        tokenizer: directory whose tokenizer files are copied.
        dtype: dtype of the stored weights.

    Raises:
        CheckpointError: the directory holds other files, or cannot be written.
    """
    files = sorted({file for pattern in TOKENIZER for file in tokenizer.glob(pattern) if file.is_file()})
    own = {CONFIG, WEIGHTS, *(file.name for file in files)}
    if others := [name for name in names_in(directory) if name not in own]:
        raise CheckpointError(f"{directory} holds {others[0]}, expected an empty directory; choose another place")
    name = str(dtype).removeprefix("torch.")
    stored = {key: value.to(dtype) for key, value in tensors(decoder)}
    write_directory(directory, {**config, "dtype": name, "torch_dtype": name}, WEIGHTS, stored, files)


def names_in(directory: Path) -> list[str]:
    """Sorted names in a directory that is to be written; empty if it does not exist yet.

    Raises:
        CheckpointError: the directory cannot be read.
    """
    try:
        return sorted(entry.name for entry in directory.iterdir()) if directory.exists() else []
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be written ({error}); check its permissions") from error


def write_directory(
    directory: Path,
    config: Mapping[str, Any],
    file: str,
    tensors: Mapping[str, Tensor],
    copied: Sequence[Path] = (),
    removed: Iterable[str] = (),
) -> None:
    """Write config.json, weights and copies of files into a directory, after all of them are written elsewhere.

    A config.json that changes is removed first and written last, so that it is never next to other weights.

    Args:
        file: name of the weight file.
        copied: files to copy.
        removed: names of files to remove from the directory.

    Raises:
        CheckpointError: the directory cannot be written.
    """
    try:
        content = json.dumps(config, indent=2) + "\n"
        new = not directory.exists()
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=BEING_WRITTEN, dir=directory.parent if new else directory) as place:
            made = Path(place) / "made"
            made.mkdir()
            (made / CONFIG).write_text(content, encoding="utf-8")
            whole = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
            save_file(whole, made / file, metadata={"format": "pt"})
            (made / file).chmod((made / CONFIG).stat().st_mode)  # safetensors writes files that only the owner can read
            for source in copied:
                shutil.copyfile(source, made / source.name)
            if new:
                made.rename(directory)
                return
            old = directory / CONFIG
            if old.exists() and old.read_bytes() != content.encode():
                old.unlink()
            for name in removed:
                (directory / name).unlink(missing_ok=True)
            for name in sorted({entry.name for entry in made.iterdir()}, key=CONFIG.__eq__):
                (made / name).replace(directory / name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{directory} cannot be written ({error}); check the free space and the permissions"
        ) from error


def tensors(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Parameters under the names, and in the pieces, of transformers for the family."""
    found, family = _named(decoder), decoder.config.family
    return joined_experts(found, family) if family in TURNED else found


def _named(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    rules = rules_for(decoder.config)
    for parameter, data in decoder.named_parameters():
        for name, rows in rules.stored(parameter):
            yield name, data.detach() if rows is None else data.detach()[rows.start : rows.stop]


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
