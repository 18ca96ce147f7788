"""A GGUF file as a checkpoint directory: its facts and tokenizer as the usual files, and a link to the file itself.

The directory lies beside the Hub's cache under a name that changes with the file, so that it is written once.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from sametoken.checkpoint.gguf import LINK
from sametoken.checkpoint.gguf.blocks import read_tensor
from sametoken.checkpoint.gguf.config import config_of, restored, single_weights, tensor_name
from sametoken.checkpoint.gguf.container import read_container
from sametoken.checkpoint.gguf.tokenizer import tokenizer_files
from sametoken.errors import CheckpointError
from sametoken.model.config import ModelConfig
from sametoken.model.formats.coded import Coded

VERSION = 3  # of what is written into the directory


def directory_of(file: Path, cache: Path) -> Path:
    """The checkpoint directory of a GGUF file, written if it is not there yet.

    Args:
        cache: where such directories are kept; a temporary one is used if it cannot be written.

    Raises:
        CheckpointError: the file is damaged.
        UnsupportedModelError: its architecture, tokenizer or a type of its blocks is not implemented.
    """
    stem, file = file.stem, file.resolve()
    try:
        state = file.stat()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror}); check its permissions") from error
    key = f"{VERSION} {file} {state.st_size} {state.st_mtime_ns}"
    place = cache / f"{stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    if (place / LINK).exists():
        return place
    container = read_container(file)
    config = config_of(container)
    ModelConfig.from_hf({key: value for key, value in config.items() if key != "quantization_config"})
    files = {"config.json": config, **tokenizer_files(container.metadata, file)}
    try:
        cache.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=".part-", dir=cache))
    except OSError:
        part = place = Path(tempfile.mkdtemp(prefix="sametoken-"))
    for name, content in files.items():
        (part / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    (part / LINK).symlink_to(file)
    part.chmod(0o755)
    if part != place:
        try:
            os.replace(part, place)
        except OSError:  # another process was faster
            return place if (place / LINK).exists() else part
    return place


def read_gguf(file: Path, *, data: bool = True) -> Iterator[tuple[str, Tensor | Coded]]:
    """Every weight of a GGUF file under its name in a Hugging Face checkpoint; raises as `directory_of`.

    Args:
        data: False gives them on the meta device, which must be torch's default device then.
    """
    container = replace(read_container(file), data=data)
    for name in container.entries:
        ours = tensor_name(container, name)
        if ours is not None:
            yield from single_weights(container, name, ours, restored(container, name, read_tensor(container, name)))
