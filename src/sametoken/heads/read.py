"""Reading of heads from directories: recognition, configuration and weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
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
from sametoken.heads.kind import Described, Head, HeadKind
from sametoken.heads.modules import pack as pack_linears
from sametoken.heads.registry import head_kind, recognise, weighted
from sametoken.model.config import ModelConfig
from sametoken.model.families import FAMILIES
from sametoken.model.formats.base import WeightFormat


class LoadedHead(NamedTuple):
    """Head, with the assumptions made about it as text."""

    config: Any  # a `HeadConfig`
    module: Head
    notes: tuple[str, ...]


def is_head(directory: Path, method: str | None = None) -> bool:
    """True if `method` drafts with a head of this directory, by its config.json or its tensor names.

    Args:
        method: method that the user named; None for any, and then a whole model is no head.
    """
    if kinds.inside(method):
        return True
    try:
        files = Files.of(directory, weights=False)
        return kinds.states_head(files.config) or recognise(Files.of(directory)) is not None
    except CheckpointError:
        return False  # the error is reported on loading


def describe(files: Files, target: ModelConfig, method: str | None = None) -> Described:
    """Describe the head in a directory.

    Args:
        method: method that the user named, which determines the kind of a head inside a target's checkpoint.

    Raises:
        CheckpointError: config.json lacks a fact or contradicts the tensors.
        UnsupportedModelError: the head is of a kind that is not implemented.
        DraftMismatchError: the head was made for another target, or is of another kind than it declares.
    """
    named, known = files.config.get("speculators_model_type"), kinds.aliases("speculators")
    if named is not None and named not in known:
        raise UnsupportedModelError(
            f"{files.where}: speculators' {named!r} is not supported; supported: {', '.join(known)}"
        )
    kind = weighted(method) if method is not None and kinds.inside(method) else recognise(files)
    if not isinstance(kind, HeadKind):
        raise _unknown(files)
    try:
        return kind.describe(files, target)
    except ConfigError as error:
        raise CheckpointError(f"{files.where}: {error}") from error


def _unknown(files: Files) -> CheckpointError:
    """Error about a directory that is not recognised as a head."""
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
    method: str | None = None,
    arrived: Callable[[], None] = lambda: None,
) -> LoadedHead:
    """Load the head of a directory, from any producer.

    Args:
        target: configuration of the target; its `max_position` bounds the RoPE tables.
        dtype: dtype of all parameters, independent of the files.
        device: device of the parameters; with "meta" no weight is read, see `checkpoint.load.load_decoder`.
        pack: pack the linears, for serving. Otherwise, for training or writing, linears stay plain, and quantised
            weights are dequantised.
        format: format to which linears are quantised when packed, None for no quantisation.
        method: see `describe`.
        arrived: called after each tensor of `Files.seen`, for progress.

    Raises:
        CheckpointError: a file is missing, damaged, or contradicts another.
        UnsupportedModelError: the kind of head or of weights is not implemented.
        DraftMismatchError: the head was made for another target, or is of another kind than it declares.
    """
    files = Files.of(directory)
    described = describe(files, target, method)
    kind = head_kind(described.config)
    with torch.device("meta"):
        head = kind.empty(described.config, dtype, format)
    data = torch.device(device).type != "meta"
    with nullcontext() if data else torch.device("meta"):
        stored = read_weights(directory, HEAD_FILES, partial(kind.reads, described.config), data=data)
        kind.fill(head, _counted(stored, arrived), files, device, pack=pack)
        if pack:
            pack_linears(head)
    return LoadedHead(described.config, head, described.notes)


def _counted(stored: Iterable[Stored | Item], arrived: Callable[[], None]) -> Iterator[Stored | Item]:
    for item in stored:
        yield item
        arrived()


def stored_dtype(directory: Path) -> torch.dtype:
    """Widest floating-point dtype among a head's weights, which represents all of them exactly."""
    found = {item.dtype for item in Files.of(directory).seen.values()} & {torch.bfloat16, torch.float16, torch.float32}
    return found.pop() if len(found) == 1 else torch.float32
