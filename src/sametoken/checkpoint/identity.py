"""Hash that identifies the model in a directory without reading all its weights."""

from __future__ import annotations

import hashlib
from pathlib import Path

from sametoken.checkpoint.tensors import weight_files
from sametoken.errors import CheckpointError

PIECE = 64 << 10  # bytes of each sample of a file
PIECES = 16


def model_digest(directory: Path) -> str:
    """SHA-256 of a checkpoint's config.json, and of the sizes, headers and samples of its weight files.

    Samples lie at even distances, so that a fine-tuned copy has another hash than its base.

    Raises:
        CheckpointError: a file is missing or unreadable.
    """
    digest = hashlib.sha256()
    try:
        digest.update((directory / "config.json").read_bytes())
        for file in weight_files(directory):
            size = file.stat().st_size
            digest.update(f"{file.name} {size}\n".encode())
            with file.open("rb") as stream:
                for piece in range(PIECES):
                    stream.seek(max(size - PIECE, 0) * piece // (PIECES - 1))
                    digest.update(stream.read(PIECE))
    except OSError as error:
        raise CheckpointError(f"{directory}: {error.filename} cannot be read ({error.strerror})") from error
    return digest.hexdigest()
