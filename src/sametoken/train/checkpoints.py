"""Checkpoints of a run, written atomically and verified when read, and its best head.

A checkpoint is a directory `checkpoint-STEP` with weights and optimiser state in float32 by parameter name, independent
of the number of processes, and a manifest with size and digest of each file. A complete one is renamed to this name.
The last few (at least one) are kept. The record of the best head has the digest of the evaluated files: if a kill
between writing files and record leaves them inconsistent, the head is evaluated again.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

from torch import Tensor

from sametoken.checkpoint.paths import user_path
from sametoken.checkpoint.write import BEING_WRITTEN
from sametoken.errors import CheckpointError, DataError, SametokenError
from sametoken.files import Stamp, make_directory, read_object, read_tensors, stamp, write_json, write_tensors
from sametoken.train.settings import KeepSettings

RECORD = "best.json"
FORMAT = 1
MANIFEST, WEIGHTS, OPTIMISER = "manifest.json", "model.safetensors", "optimizer.safetensors"
PROGRESS = {"step": (int,), "best": (float, int, NoneType), "judged": (int,), "stale": (int,), "ended": (bool,)}
NAME = re.compile(r"checkpoint-(\d{1,18})")
EVALUATED = ".judged-"  # prefix of a temporary head for evaluation
LEFT = (".checkpoint-*", f"{EVALUATED}*", f"{BEING_WRITTEN}*", ".head-*", ".model-*")  # remnants of a killed process


class Saved(NamedTuple):
    """State from which a run continues.

    Attributes:
        weights: parameters and buffers by name.
        optimiser: moments by "parameter/kind".
        progress: plain values: step, place in the data, best evaluation and others.
        settings: settings that determine the results; a run with other settings cannot continue from this state.
    """

    weights: Mapping[str, Tensor]
    optimiser: Mapping[str, Tensor]
    progress: Mapping[str, Any]
    settings: Mapping[str, Any]


def save(directory: Path, step: int, saved: Saved, keep: int) -> Path:
    """Write `checkpoint-STEP` and remove the oldest beyond `keep`.

    Raises:
        CheckpointError: the disk is full or not writable; earlier checkpoints are unchanged.
    """
    final, part = directory / f"checkpoint-{step}", directory / f".checkpoint-{step}.part"
    shutil.rmtree(part, ignore_errors=True)
    try:
        make_directory(part)
        stamps = {
            WEIGHTS: write_tensors(part / WEIGHTS, dict(saved.weights)),
            OPTIMISER: write_tensors(part / OPTIMISER, dict(saved.optimiser)),
        }
        files = {name: stamp._asdict() for name, stamp in stamps.items()}
        content = {"format": FORMAT, "files": files, "progress": saved.progress, "settings": saved.settings}
        write_json(part / MANIFEST, content)
        if final.exists():
            shutil.rmtree(final)
        os.replace(part, final)
    except (OSError, DataError) as error:
        raise CheckpointError(f"{final} cannot be written: {error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    for old in all_checkpoints(directory)[:-keep]:
        gone = directory / f".{old.name}.part"
        os.replace(old, gone)  # a partly removed checkpoint would look like one
        shutil.rmtree(gone)
    return final


def note(directory: Path, progress: Mapping[str, Any]) -> None:
    """Update the progress in the checkpoint of the same step, if there is one, after an evaluation.

    Raises:
        CheckpointError: the disk is full or not writable.
    """
    file = directory / f"checkpoint-{progress['step']}" / MANIFEST
    if not file.exists():
        return
    try:
        write_json(file, {**read_object(file), "progress": dict(progress)})
    except DataError as error:
        raise CheckpointError(f"{file} cannot be written: {error}") from error


def sweep(directory: Path, name: str) -> None:
    """Remove incomplete files of a killed run and of its head; no other process may use the directory."""
    for place in (directory, directory / name):
        for pattern in LEFT:
            for left in place.glob(pattern):
                shutil.rmtree(left, ignore_errors=True)


def all_checkpoints(directory: Path) -> list[Path]:
    """Checkpoints of a run, oldest first."""
    if not directory.is_dir():
        return []
    found = {int(name[1]): path for path in directory.iterdir() if (name := NAME.fullmatch(path.name))}
    return [found[step] for step in sorted(found)]


def last(directory: Path, *, resume: bool) -> Path | None:
    """Newest checkpoint of a run, None if there is none.

    Raises:
        SametokenError: there is one, and `resume` is false.
    """
    found = all_checkpoints(directory)
    if found and not resume:
        raise SametokenError(
            f"{directory} holds checkpoints of an earlier run; choose another --output-dir, delete them, or go on with "
            "--resume"
        )
    return found[-1] if found else None


def load(checkpoint: Path, settings: Mapping[str, Any]) -> Saved:
    """Load a checkpoint and verify its digests.

    Args:
        settings: settings of the run that continues.

    Raises:
        CheckpointError: a file is missing or damaged, or the settings differ; the message has the first difference.
    """
    file = checkpoint / MANIFEST
    try:
        content = read_object(file)
        if content.get("format") != FORMAT:
            raise CheckpointError(f"{file}: format {content.get('format')!r}, expected {FORMAT}; start anew elsewhere")
        stamps = {name: Stamp(**content["files"][name]) for name in (WEIGHTS, OPTIMISER)}
        weights, optimiser = (read_tensors(checkpoint / name, stamp) for name, stamp in stamps.items())
        found, progress = dict(content["settings"]), _progress(content["progress"], checkpoint)
    except DataError as error:
        raise CheckpointError(f"{error.problem}; delete {checkpoint} to go on from the one before") from error
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: not the manifest of a checkpoint ({error!r}); delete {checkpoint}") from error
    for name in sorted({*found, *settings}):
        if found.get(name) != settings.get(name):
            raise CheckpointError(
                f"{checkpoint}: trained with {name} = {found.get(name)!r}, expected {settings.get(name)!r}; go on with "
                "what it was trained with, choose another --output-dir, or delete the checkpoints to start anew"
            )
    return Saved(weights, optimiser, progress, found)


def _progress(found: Any, checkpoint: Path) -> dict[str, Any]:
    """Validated progress of a manifest. Raises TypeError or ValueError for an impossible value."""
    for name, kinds in PROGRESS.items():
        if type(found[name]) not in kinds:
            raise TypeError(f"{name} is {found[name]!r}")
    if checkpoint.name != f"checkpoint-{found['step']}":
        raise ValueError(f"step is {found['step']}")
    return dict(found)


def evaluated_by(keep: KeepSettings) -> dict[str, Any]:
    """Conditions of an evaluation other than the head: prompts, answer tokens and draft length."""
    assert keep.eval_data is not None
    file = user_path(keep.eval_data)
    return {
        "eval_data": stamp(file).sha256 if file.is_file() else keep.eval_data,
        "eval_prompts": keep.eval_prompts, "eval_tokens": keep.eval_tokens, "max_draft_len": keep.max_draft_len,
    }  # fmt: skip


class Best:
    """Best head in `place`, for use by the main process alone.

    Attributes:
        place: directory of the head, which may not exist yet.
        acceptance: acceptance length, None if the head was not evaluated.
    """

    def __init__(self, place: Path) -> None:
        self.place, self._record = place, place.parent / RECORD
        self._conditions: Mapping[str, Any] = {}
        self.acceptance = self._recorded()

    def comparable(self, conditions: Mapping[str, Any]) -> bool:
        """True if an evaluation under these conditions is comparable with the best head's, or there is no head."""
        return not self.place.exists() or (self.acceptance is not None and self._conditions == conditions)

    def note(self, acceptance: float, conditions: Mapping[str, Any]) -> None:
        """Record the acceptance length of the head in `place`."""
        self.acceptance, self._conditions = acceptance, dict(conditions)
        content = {"acceptance": acceptance, "judged_by": self._conditions, "sha256": self._digest()}
        write_json(self._record, content)

    def offer(self, acceptance: float, conditions: Mapping[str, Any], write: Callable[[Path], None]) -> None:
        """Call `write` to replace the head in `place` if the acceptance length is greater; they must be comparable."""
        if self.acceptance is None or acceptance > self.acceptance:
            write(self.place)
            self.note(acceptance, conditions)

    def _recorded(self) -> float | None:
        try:
            found = read_object(self._record)
            acceptance, conditions, digest = (found[name] for name in ("acceptance", "judged_by", "sha256"))
            if isinstance(acceptance, float) and isinstance(conditions, dict) and digest == self._digest():
                self._conditions = conditions
                return acceptance
        except (DataError, KeyError, OSError):
            pass  # evaluated again
        return None

    def _digest(self) -> str:
        return stamp(*sorted(file for file in self.place.iterdir() if file.is_file())).sha256
