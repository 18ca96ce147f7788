"""Paths of the target, draft and head that are part of the package.

They are ordinary Hugging Face checkpoints, so any other program can load the same directories.
"""

from __future__ import annotations

from pathlib import Path

NAME = "embedded"  # name of the pair for options that take a model
TARGET = Path(__file__).parent / "target"
DRAFT = Path(__file__).parent / "draft"
HEAD_NAME = "embedded-eagle3"  # name of the head for options that take a draft
HEAD = Path(__file__).parent / "head"


def target(model: str) -> str:
    """Path of the embedded target if `model` is its name, otherwise `model` itself."""
    return str(TARGET) if model == NAME else model


def draft(model: str) -> str:
    """Path of the embedded draft or head of this name, otherwise the name itself."""
    return {NAME: str(DRAFT), HEAD_NAME: str(HEAD)}.get(str(model), model)
