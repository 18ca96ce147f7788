"""The target and draft that come with the package: where they are, nothing more.

Both are ordinary Hugging Face checkpoints, so any other program can load the same directories.
"""

from __future__ import annotations

from pathlib import Path

NAME = "embedded"  # what a user calls the pair where a model is asked for
TARGET = Path(__file__).parent / "target"
DRAFT = Path(__file__).parent / "draft"


def target(model: str) -> str:
    """Where a target of this name is: the embedded one, or what the name says."""
    return str(TARGET) if model == NAME else model


def draft(model: str) -> str:
    """Where a draft of this name is."""
    return str(DRAFT) if model == NAME else model
