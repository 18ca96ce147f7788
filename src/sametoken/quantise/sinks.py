"""Destinations of quantised checkpoints: a directory in the layout of Hugging Face, or one GGUF file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Protocol

from torch import Tensor

from sametoken import __version__
from sametoken.checkpoint.gguf.write import GgufWriter, facts, vocabulary
from sametoken.checkpoint.hub import SMALL_FILES
from sametoken.checkpoint.quantised.write import LAYOUTS, stated
from sametoken.checkpoint.write import Shards
from sametoken.model.formats.coded import Coded
from sametoken.prompts.sources import BUILT_IN
from sametoken.quantise.run import Sink
from sametoken.quantise.source import PlainCheckpoint


class Writer(Sink, Protocol):
    """Sink that writes into a temporary directory.

    Attributes:
        name: name of the model file in the directory; "" if the directory is the model.
    """

    name: str

    def finish(self) -> int:
        """Write the remaining files; return the bytes of all weights."""
        ...


class DirectorySink:
    """Checkpoint in the layout of compressed-tensors or Model-Optimizer.

    Args:
        directory: empty directory.
        source: plain checkpoint.
        format: key of `LAYOUTS`.
        group: inputs that share a scale; None for one scale per row.
    """

    rounds_outer, name = False, ""

    def __init__(self, directory: Path, source: PlainCheckpoint, format: str, group: int | None) -> None:
        self._directory, self._source, self._format, self._group = directory, source, format, group
        self._shards = Shards(directory)
        self._plain = ["lm_head"]  # linear layers that are not quantised

    def add(self, name: str, value: Tensor | Coded, peak: float = 0.0) -> None:
        module, _, kind = name.rpartition(".")
        if isinstance(value, Coded):
            for part, tensor in LAYOUTS[self._format].parts(value, peak).items():
                self._shards.add(f"{module}.{part}", tensor)
            return
        place = self._source.rules.place(name)
        if kind == "weight" and value.dim() == 2 and place is not None and place.parameter.startswith("blocks."):
            self._plain.append(module)
        self._shards.add(name, value)

    def finish(self) -> int:
        self._shards.finish()
        files = stated(self._format, self._group, self._plain, __version__)
        files["config.json"] = {**self._source.stated, **files["config.json"]}
        copy_small_files(self._source.directory, self._directory)
        for name, content in files.items():
            (self._directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        return self._shards.size


def copy_small_files(source: Path, directory: Path) -> None:
    """Copy tokenizer, chat template and generation settings."""
    for pattern in SMALL_FILES:
        for file in source.glob(pattern):
            if file.is_file():
                place = directory / file.relative_to(source)
                place.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, place)


class GgufSink:
    """One GGUF file in a directory, with embeddings and lm_head in Q8_0.

    Raises:
        UnsupportedModelError: the architecture or the tokenizer cannot be written as GGUF.
    """

    rounds_outer = True

    def __init__(self, directory: Path, source: PlainCheckpoint, format: str) -> None:
        self.name = f"model-{format.removeprefix('gguf-')}.gguf"
        words = [*BUILT_IN, *TEXTS]
        self._metadata = facts(source.config, source.directory.name, format) | vocabulary(
            source.directory, source.config.vocab_size, words
        )
        self._source = source
        self._writer = GgufWriter(directory / self.name, source.config)

    def add(self, name: str, value: Tensor | Coded, peak: float = 0.0) -> None:
        if not self._source.rules.ignores(name):
            self._writer.add(name, value)

    def finish(self) -> int:
        return self._writer.finish(self._metadata)


# Texts that different pre-tokenizers split differently.
TEXTS = (
    "Numbers 1 12 123 1234 12345 and 3.14, dates 2024-05-06.", "  two spaces\n\n\ttabs\r\nlines \n ",
    "I'M WE'll it'S don't",
    "camelCase HTTPServer snake_case path/to/file.py#L10", "Grüße, 東京へ行く。 Привет мир! مرحبا 🙂👍🏽",
)  # fmt: skip


def open_writer(directory: Path, source: PlainCheckpoint, format: str, group: int | None) -> Writer:
    """Open the writer of a format for an empty directory."""
    if format.startswith("gguf-"):
        return GgufSink(directory, source, format)
    return DirectorySink(directory, source, format, group)
