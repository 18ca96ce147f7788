"""GGUF, the file format of llama.cpp: a model, its tokenizer and its metadata in one file."""

from __future__ import annotations

from pathlib import Path

LINK = "sametoken.gguf"  # link to a GGUF file, in the directory that stands for the file


def given_path(directory: Path) -> Path:
    """Path from the user: the GGUF file for which a directory stands, otherwise the directory itself."""
    link = directory / LINK
    return link.resolve() if link.is_symlink() else directory
