"""GGUF, the file format of llama.cpp: a model, its tokenizer and its facts in one file."""

from __future__ import annotations

from pathlib import Path

LINK = "sametoken.gguf"  # the name of the GGUF file in the directory that stands for it


def given_path(directory: Path) -> Path:
    """Path that the user gave: the GGUF file for which a directory stands, otherwise the directory itself."""
    link = directory / LINK
    return link.resolve() if link.is_symlink() else directory
