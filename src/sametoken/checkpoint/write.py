"""A decoder written as the ordinary Hugging Face checkpoint that it was, or could have been, read from."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from sametoken.checkpoint.experts import joined_experts
from sametoken.checkpoint.hub import SMALL_FILES
from sametoken.checkpoint.mapping import rules_for
from sametoken.errors import CheckpointError
from sametoken.model.decoder import Decoder

CONFIG, WEIGHTS = "config.json", "model.safetensors"
TOKENIZER = tuple(pattern for pattern in SMALL_FILES if "config.json" not in pattern)


def write_model(
    decoder: Decoder, directory: Path, config: Mapping[str, Any], tokenizer: Path, dtype: torch.dtype
) -> None:
    """Writes a model that transformers and the engine load, all of it or nothing.

    Args:
        decoder: with plain, unpacked linears.
        directory: is made, or replaced if it holds nothing but what this writes.
        config: config.json of the decoder, but for the dtype.
        tokenizer: directory whose tokenizer files are copied.
        dtype: of the stored weights.

    Raises:
        CheckpointError: the directory holds other files, or cannot be written.
    """
    files = sorted({file for pattern in TOKENIZER for file in tokenizer.glob(pattern) if file.is_file()})
    own = {CONFIG, WEIGHTS, *(file.name for file in files)}
    name = str(dtype).removeprefix("torch.")
    content = json.dumps({**config, "dtype": name, "torch_dtype": name}, indent=2) + "\n"
    try:
        new = not directory.exists()
        if not new and (others := sorted({entry.name for entry in directory.iterdir()} - own)):
            raise CheckpointError(f"{directory} holds {others[0]}, expected an empty directory; choose another place")
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".model-", dir=directory.parent if new else directory) as place:
            made = Path(place) / "model"
            made.mkdir()
            stored = {key: value.to(dtype).contiguous().cpu() for key, value in tensors(decoder)}
            save_file(stored, made / WEIGHTS, metadata={"format": "pt"})
            (made / CONFIG).write_text(content, encoding="utf-8")
            (made / WEIGHTS).chmod((made / CONFIG).stat().st_mode)  # safetensors lets only the owner read
            for file in files:
                shutil.copyfile(file, made / file.name)
            if new:
                made.rename(directory)
            else:
                _move(made, directory, content)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{directory} cannot be written ({error}); check the free space") from error


def _move(made: Path, directory: Path, content: str) -> None:
    """Puts files in the place of others; a config.json that changes is absent while the weights are not its own."""
    old = directory / CONFIG
    if old.exists() and old.read_text(encoding="utf-8") != content:
        old.unlink()
    for name in sorted({entry.name for entry in made.iterdir()}, key=CONFIG.__eq__):
        (made / name).replace(directory / name)


def tensors(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """The parameters under the names, and in the pieces, that transformers has for the family."""
    found = _named(decoder)
    return joined_experts(found) if decoder.config.family == "gpt_oss" else found


def _named(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    rules = rules_for(decoder.config)
    for parameter, data in decoder.named_parameters():
        for name, rows in rules.stored(parameter):
            yield name, data.detach() if rows is None else data.detach()[rows.start : rows.stop]
