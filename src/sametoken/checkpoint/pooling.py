"""Pooling of a text's last hidden states to one vector, read from an embedding model's sentence-transformers files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sametoken.checkpoint.hub import read_json
from sametoken.checkpoint.tensors import FILE_NAME
from sametoken.errors import CheckpointError, shown
from sametoken.files import read_text

FILE = "modules.json"
MODES: dict[str, Literal["last", "mean", "first"]] = {
    "pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "first"
}  # fmt: skip


class Pooling(NamedTuple):
    """Pooling of the hidden states of a text to one vector.

    Attributes:
        mode: state of the last token, mean of all states, or state of the first token.
        normalize: true to scale vectors to length 1.
    """

    mode: Literal["last", "mean", "first"]
    normalize: bool

    def __call__(self, states: Tensor) -> Tensor:
        """Pool the last hidden states of a text after the final norm, [S, H], to float32 [H]."""
        states = states.float()
        vector = states.mean(0) if self.mode == "mean" else states[-1 if self.mode == "last" else 0]
        return torch.nn.functional.normalize(vector, dim=0) if self.normalize else vector


def read_pooling(directory: Path) -> Pooling | None:
    """Read the pooling of the model in a directory; None if it is no embedding model.

    Raises:
        CheckpointError: the files are damaged, or name a module that is not supported.
    """
    if not (directory / FILE).exists():
        return None
    try:
        modules = json.loads(read_text(directory / FILE))
        names = [(str(each["type"]), str(each.get("path", ""))) for each in modules]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{directory / FILE}: {type(error).__name__}: {error}; expected a list of objects with type and path"
        ) from error
    kinds = {kind.rpartition(".")[2]: path for kind, path in names}
    if unknown := sorted(kinds.keys() - {"Transformer", "Pooling", "Normalize"}):
        raise CheckpointError(
            f"{directory / FILE}: the module {unknown[0]} is not supported; expected Transformer, Pooling and Normalize"
        )
    place = kinds.get("Pooling", "1_Pooling")
    if not FILE_NAME.fullmatch(place):
        raise CheckpointError(f"{directory / FILE}: names {shown(place)}, expected a directory beside it")
    file = directory / place / "config.json"
    stated = read_json(file) or {}
    chosen = [mode for key, mode in MODES.items() if stated.get(key) is True]
    others = sorted(key for key, value in stated.items() if key.startswith("pooling_mode_") and value is True)
    if len(chosen) != 1 or len(others) != 1:
        got = ", ".join(others) or "no pooling mode"
        raise CheckpointError(f"{file}: got {got}; expected one of {', '.join(MODES)}")
    return Pooling(chosen[0], "Normalize" in kinds)
