"""Hidden states that NVIDIA's Model Optimizer wrote: files .pt, one for each conversation, read in place.

A file has `input_ids`, `hidden_states`, `aux_hidden_states`, and perhaps `loss_mask` and `hidden_states_prenorm`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sametoken.errors import DataError
from sametoken.learning.target import Features
from sametoken.model.layers import RMSNorm
from sametoken.train.dataset.masks import Masked
from sametoken.train.dataset.preparation import Tokenised

IDS, LAST, TAPS, MASK, BEFORE_NORM = (
    "input_ids", "hidden_states", "aux_hidden_states", "loss_mask", "hidden_states_prenorm"
)  # fmt: skip


def has_dumps(directory: Path) -> bool:
    """Return True for a directory with files .pt, also in directories below it."""
    return directory.is_dir() and next(directory.rglob("*.pt"), None) is not None


class DumpedStates:
    """Files of one directory, in the order of their names.

    Args:
        taps: 0-based blocks of the target whose outputs `aux_hidden_states` has; () if they are not needed.
        norm: final norm of the target.
    """

    def __init__(self, directory: Path, taps: tuple[int, ...], norm: RMSNorm) -> None:
        self._directory, self._taps, self._norm = directory, taps, norm
        self._width = len(norm.weight)
        self._names = sorted(str(file.relative_to(directory)) for file in directory.rglob("*.pt"))
        self._samples: Sequence[tuple[str, int]] = ()

    @property
    def taps(self) -> tuple[int, ...]:
        """0-based blocks whose outputs are read, in addition to the last state."""
        return self._taps

    def digest(self) -> str:
        """SHA-256 of the names, sizes and times of all files; their contents would take long."""
        stats = [(name, (self._directory / name).stat()) for name in self._names]
        lines = "".join(f"{name} {found.st_size} {found.st_mtime_ns}\n" for name, found in stats)
        return hashlib.sha256(lines.encode()).hexdigest()

    def rows(self, all_tokens: bool) -> Iterator[Tokenised]:
        """Yield tokens and loss mask of each file, with its name as id.

        Raises:
            DataError: a file is damaged or of another model, or has no loss mask although one is needed.
        """
        for name in self._names:
            found = self._read(name)
            tokens = found[IDS].tolist()
            if all_tokens:
                yield Tokenised(name, Masked(tokens, [True] * len(tokens)))
                continue
            mask = found.get(MASK)
            if not isinstance(mask, Tensor) or mask.numel() != len(tokens):
                raise DataError(
                    f"{self._directory / name}: no {MASK} for {len(tokens)} tokens; dump with --answer-only-loss, or "
                    "train with --all-tokens"
                )
            yield Tokenised(name, Masked(tokens, mask.flatten().bool().tolist()))

    def over(self, names: Sequence[str], lengths: Sequence[int]) -> DumpedStates:
        """Hidden states of samples, whose ids are names of files; a sample may have fewer tokens than its file."""
        self._samples = list(zip(names, lengths, strict=True))
        return self

    def __getitem__(self, sample: int) -> Features:
        """Hidden states of a sample. Raises DataError for a damaged file."""
        name, length = self._samples[sample]
        found = self._read(name)
        last = found[LAST][:length]
        stated = found.get(BEFORE_NORM)
        if bool(stated) if stated is not None else not self._normed(last):
            last = self._norm(last.to(self._norm.weight.dtype))
        taps = found[TAPS][:length] if self._taps else last.new_zeros(len(last), 0)
        if not (last.isfinite().all() and taps.isfinite().all()):
            raise DataError(
                f"{self._directory / name}: the hidden states hold NaN or Inf; dump this conversation again"
            )
        return Features(taps, last)

    def _normed(self, last: Tensor) -> bool:
        """Return True for states after the final norm: divided by its weight, they have a root mean square of 1."""
        weight = self._norm.weight.float() + self._norm.shift
        used = weight.abs() > weight.abs().max() / 100
        size = (last.float()[:, used] / weight[used]).pow(2).mean(-1).sqrt().median()
        return bool(0.8 < size < 1.25)

    def _read(self, name: str) -> dict[str, Any]:
        """Content of a file, with checked shapes; tensors are mapped, not loaded."""
        file = self._directory / name
        try:
            found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # any exception of torch for a damaged file
            raise DataError(f"{file}: not a dump of hidden states, expected tensors alone by torch.save") from error
        needed = (IDS, LAST, TAPS) if self._taps else (IDS, LAST)
        missing = [key for key in needed if not isinstance(found, dict) or not isinstance(found.get(key), Tensor)]
        if missing:
            raise DataError(
                f"{file}: no tensor {missing[0]}, expected {', '.join(needed)} as Model Optimizer dumps them"
            )
        if found[IDS].is_floating_point():
            raise DataError(f"{file}: {IDS} are numbers of {found[IDS].dtype}, expected integers".replace("torch.", ""))
        found = {**found, IDS: found[IDS].flatten()}
        count, width, n = len(found[IDS]), self._width, len(self._taps)
        shapes = {LAST: (count, width)} | ({TAPS: (count, n * width)} if n else {})
        for key, shape in shapes.items():
            found[key] = found[key].squeeze(0) if found[key].dim() == 3 else found[key]
            if found[key].shape != shape:
                raise DataError(
                    f"{file}: {key} has the shape {tuple(found[key].shape)}, expected {shape} for {count} tokens, a "
                    f"target of width {width} and the blocks {', '.join(map(str, self._taps)) or 'none'} (--taps)"
                )
        return found
