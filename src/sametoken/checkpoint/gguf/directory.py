"""Checkpoint directory of a GGUF file: metadata and tokenizer as the usual files, and a link to the file.

The directory is next to the Hub's cache, under a name that changes with the file, so that it is written once.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from sametoken.checkpoint.gguf import LINK
from sametoken.checkpoint.gguf.blocks import read_tensor
from sametoken.checkpoint.gguf.config import config_of, restored, single_weights, tensor_name
from sametoken.checkpoint.gguf.container import AGAIN, read_container
from sametoken.checkpoint.gguf.parts import part_files
from sametoken.checkpoint.gguf.tokenizer import tokenizer_files
from sametoken.errors import CheckpointError, UnsupportedModelError
from sametoken.model.config import ModelConfig
from sametoken.model.formats.coded import Coded

VERSION = 5  # of the written files
MOST = 64  # directories that are kept
PART = ".part-"  # prefix of a directory that is being written
ABANDONED_S = 3600  # without use; then a directory of a killed process or an old version is removed


def directory_of(file: Path, cache: Path) -> Path:
    """Return the checkpoint directory of a GGUF file, written if it does not exist yet.

    Args:
        file: GGUF file, or one of its parts.
        cache: parent of such directories; a temporary directory is used if the parent cannot be written.

    Raises:
        CheckpointError: the file is damaged.
        UnsupportedModelError: the architecture, the tokenizer or a type of blocks is not implemented.
    """
    files = part_files(file)
    named = files[0].absolute()
    file = named.resolve() if len(files) == 1 else named
    try:
        states = [each.stat() for each in files]
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read ({error.strerror}); check its permissions") from error
    key = " ".join([f"{VERSION} {file}", *(f"{state.st_size} {state.st_mtime_ns}" for state in states)])
    place = cache / f"{named.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    if (place / LINK).exists():
        with suppress(OSError):  # of another user
            os.utime(place)
        return place
    try:
        written = _contents(named)
    except UnsupportedModelError:
        raise
    except CheckpointError as error:
        if named == file:
            raise
        raise CheckpointError(f"{error} (delete {file} first, to which it is a link)") from error
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _tidy(cache, file)
        part = _written(Path(tempfile.mkdtemp(prefix=PART, dir=cache)), written, file)
    except OSError:  # full, or not writable
        return _written(Path(tempfile.mkdtemp(prefix="sametoken-")), written, file)
    try:
        os.replace(part, place)
    except OSError:  # another process was faster
        return place if (place / LINK).exists() else part
    return place


def _contents(file: Path) -> dict[str, Any]:
    """Contents of the files that stand for the metadata of a GGUF file, by name; raise as `directory_of`."""
    container = read_container(file)
    config = config_of(container)
    ModelConfig.from_hf({key: value for key, value in config.items() if key != "quantization_config"})
    written = {"config.json": config, **tokenizer_files(container.metadata, file)}
    if (tokens := len(written["tokenizer.json"]["model"]["vocab"])) > config["vocab_size"]:
        words = f"{tokens} tokens and {config['vocab_size']} rows in token_embd.weight, expected a row for each token"
        raise CheckpointError(f"{file}: {words}; {AGAIN}")
    return written


def _written(place: Path, contents: Mapping[str, Any], file: Path) -> Path:
    try:
        for name, content in contents.items():
            (place / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        (place / LINK).symlink_to(file)
        place.chmod(0o755)
    except OSError:
        shutil.rmtree(place, ignore_errors=True)
        raise
    return place


def _tidy(cache: Path, file: Path) -> None:
    """Remove directories of deleted files, old ones of `file`, and those of killed processes; then the oldest.

    A recent directory of `file` stays: another version of this package may be about to read it.
    """
    now, kept = time.time(), []
    for place in cache.iterdir():
        link, age = place / LINK, now - place.lstat().st_mtime
        if place.name.startswith(PART):
            useless = age > ABANDONED_S
        else:
            useless = link.is_symlink() and (not link.exists() or (link.readlink() == file and age > ABANDONED_S))
        if useless:
            shutil.rmtree(place, ignore_errors=True)
        elif link.is_symlink() and not place.name.startswith(PART):
            kept.append((age, place))
    for _, place in sorted(kept)[MOST - 1 :]:
        shutil.rmtree(place, ignore_errors=True)


def read_gguf(file: Path, *, data: bool = True) -> Iterator[tuple[str, Tensor | Coded]]:
    """Yield every weight of a GGUF file under its name in a Hugging Face checkpoint; raise as `directory_of`.

    Args:
        data: false for weights on the meta device, which must then be torch's default device.
    """
    container = replace(read_container(file), data=data)
    for name in container.entries:
        ours = tensor_name(container, name)
        if ours is not None:
            yield from single_weights(container, name, ours, restored(container, name, read_tensor(container, name)))
