"""Training of heads and drafts: public names, imported on first use, since settings need no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sametoken.train.hf.converted import convert, restore

__all__ = ["convert", "restore"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.hf.converted"), name)
