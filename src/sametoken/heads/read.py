"""Heads on disk: whether a directory holds one, what it computes, and the module it becomes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sametoken import kinds
from sametoken.checkpoint.contents import architectures
from sametoken.checkpoint.load import read_weights
from sametoken.checkpoint.quantised.collect import Item
from sametoken.checkpoint.tensors import Stored
from sametoken.errors import CheckpointError, ConfigError, UnsupportedModelError
from sametoken.heads.files import HEAD_FILES, Files
from sametoken.heads.kind import Described, Head
from sametoken.heads.modules import pack as pack_linears
from sametoken.heads.registry import head_kind, recognise
from sametoken.model.config import ModelConfig
from sametoken.model.families import FAMILIES
from sametoken.model.formats.base import WeightFormat


class LoadedHead(NamedTuple):
    """A head and what had to be assumed about it, in words."""

    config: Any  # a `HeadConfig`
    module: Head
    notes: tuple[str, ...]


def is_head(directory: Path) -> bool:
    """True if a directory holds a head rather than a whole model, by its config.json or else by the tensors' names."""
    try:
        files = Files.of(directory, weights=False)
        return kinds.states_head(files.config) or recognise(Files.of(directory)) is not None
    except CheckpointError:
        return False  # whoever loads it says what is wrong


def describe(files: Files, target: ModelConfig) -> Described:
    """Describe the head in a directory.

    Raises:
        CheckpointError: config.json lacks a fact or contradicts the tensors.
        UnsupportedModelError: the head is of a kind that is not implemented.
        DraftMismatchError: it was made for another target, or is another kind of head than it says.
    """
    named, known = files.config.get("speculators_model_type"), kinds.aliases("speculators")
    if named is not None and named not in known:
        raise UnsupportedModelError(
            f"{files.where}: speculators' {named!r} is not supported; supported: {', '.join(known)}"
        )
    kind = recognise(files)
    if kind is None:
        raise _unknown(files)
    try:
        return kind.describe(files, target)
    except ConfigError as error:
        raise CheckpointError(f"{files.where}: {error}") from error


def _unknown(files: Files) -> CheckpointError:
    """Reason why a directory is taken for no head."""
    names = architectures(files.config)
    if any(name.endswith("embed_tokens.weight") for name in files.seen) and any(name in FAMILIES for name in names):
        return CheckpointError(
            f"{files.where} is a whole model ({names[0]}), expected a head ({kinds.titles()}); a model that drafts is "
            "given as --draft where text is made, and needs no export"
        )
    return CheckpointError(
        f"{files.where}: no tensors of a known head ({kinds.titles()}), found "
        f"{', '.join(sorted(files.seen)[:6]) or 'no tensors'}"
    )


def read_head(
    directory: Path,
    target: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    pack: bool,
    format: WeightFormat | None = None,
    arrived: Callable[[], None] = lambda: None,
) -> LoadedHead:
    """The head of a directory with its weights in place, whoever wrote it.

    Args:
        target: facts of the model it drafts for; its `max_position` bounds the rotary tables.
        dtype: of all parameters, whatever the files hold.
        device: where they live; with "meta" no weight is read, see `checkpoint.load.load_decoder`.
        pack: pack the linears, for serving; a head that will be trained or written again stays plain, and the weights
            of a quantised one become so.
        format: what the linears are quantised to when they are packed, None for nothing.
        arrived: called after each of the tensors that `Files.seen` lists, for progress.

    Raises:
        CheckpointError: a file is missing, damaged, or contradicts another.
        UnsupportedModelError: the kind of head or of weights is not implemented.
        DraftMismatchError: it was made for another target, or is another kind of head than it says.
    """
    files = Files.of(directory)
    described = describe(files, target)
    kind = head_kind(described.config)
    with torch.device("meta"):
        head = kind.empty(described.config, dtype, format)
    data = torch.device(device).type != "meta"
    with nullcontext() if data else torch.device("meta"):
        stored = read_weights(directory, names=HEAD_FILES, data=data)
        kind.fill(head, _counted(stored, arrived), files, device, pack=pack)
        if pack:
            pack_linears(head)
    return LoadedHead(described.config, head, described.notes)


def _counted(stored: Iterable[Stored | Item], arrived: Callable[[], None]) -> Iterator[Stored | Item]:
    for item in stored:
        yield item
        arrived()


def stored_dtype(directory: Path) -> torch.dtype:
    """The widest floating dtype among a head's weights, which keeps all of their bits."""
    found = {item.dtype for item in Files.of(directory).seen.values()} & {torch.bfloat16, torch.float16, torch.float32}
    return found.pop() if len(found) == 1 else torch.float32
