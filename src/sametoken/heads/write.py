"""Atomic writing of a head to a directory, in the layout of an engine."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from sametoken.checkpoint.quantised.collect import RANGES
from sametoken.checkpoint.quantised.write import LAYOUTS, StoredFormat, stated
from sametoken.checkpoint.write import names_in, write_directory
from sametoken.errors import CheckpointError, ConfigError, UnsupportedModelError, unknown_name
from sametoken.heads.files import HEAD_FILES
from sametoken.heads.kind import ENGINES, NO_SUCH_DRAFTS, Head
from sametoken.heads.modules import linears
from sametoken.heads.read import is_head
from sametoken.heads.registry import head_kind
from sametoken.model.config import ModelConfig
from sametoken.model.formats.coded import Coded


def write_head(
    head: Head,
    directory: Path,
    target: ModelConfig,
    *,
    layout: str = "hf",
    target_name: str,
    dtype: torch.dtype | None = None,
    force: bool = False,
    stored: StoredFormat | None = None,
) -> tuple[str, ...]:
    """Write a head for an engine, atomically.

    Args:
        head: head with plain, unpacked linears, or quantised by `modules.round_linears` to `stored`.
        directory: path to create, or to replace if it is empty or contains only a head.
        target: configuration of the target.
        layout: a key of `heads.kind.ENGINES`.
        target_name: name of the target for readers of the files.
        dtype: dtype of the stored weights, by default the head's own.
        force: write into a directory with other files, which stay.
        stored: format of quantised linears, None for plain ones.

    Returns:
        Advice for serving the head.

    Raises:
        UnsupportedModelError: the engine does not support a part of the head.
        CheckpointError: the directory contains other files, or cannot be written.
    """
    if layout not in ENGINES:
        raise ConfigError(unknown_name("layout", layout, ENGINES))
    if any(part.packed or part.native or part.stored or (part.coded and not stored) for part in linears(head).values()):
        raise CheckpointError("the head is packed for serving; read it with pack=False to write it")
    kind = head_kind(head.config)
    written = kind.lay_out(head, target, layout, target_name)
    full = kind.lay_out(head, target, "hf", target_name).tensors if layout == "vllm" else None
    reasons = kind.refusals(head.config, layout, full)
    if reasons == [NO_SUCH_DRAFTS]:
        raise UnsupportedModelError(
            f"{ENGINES[layout]} has no {kind.title(head.config)} drafts, so it cannot run this head; serve it with "
            "sametoken"
        )
    if reasons:
        raise UnsupportedModelError(
            f"{ENGINES[layout]} cannot run this head as it was trained: {'; '.join(reasons)}. Serve it with sametoken, "
            "or train one without"
        )
    kept = {parameter.dtype for parameter in head.parameters()}
    dtype = dtype or (kept.pop() if len(kept) == 1 else torch.float32)
    name = str(dtype).removeprefix("torch.")
    written.config.update({key: name for key in ("dtype", "torch_dtype") if key in written.config})
    tensors: dict[str, Tensor] = {}
    for key, value in written.tensors.items():
        if isinstance(value, Coded):
            assert stored is not None, "the linears are rounded"
            module = key.removesuffix("weight")
            parts = LAYOUTS[stored.format].parts(value, 0.0)
            tensors |= {f"{module}{part}": tensor for part, tensor in parts.items() if part not in RANGES}
        else:
            tensors[key] = value.to(dtype) if value.is_floating_point() else value
    if stored is not None:
        group = stored.rounding.group
        written.config.update(stated(stored.format, group, (), rows=False)["config.json"])
    _check_place(directory, force)
    others = (name for name in HEAD_FILES if name != written.file)
    write_directory(directory, written.config, written.file, tensors, removed=others)
    return kind.advice(head.config, layout)


def _check_place(directory: Path, force: bool) -> None:
    names = names_in(directory)
    others = [name for name in names if name not in ("config.json", *HEAD_FILES)]
    if not force and (others or (names and not is_head(directory))):
        raise CheckpointError(
            f"{directory} holds {others[0] if others else 'a whole model'}, expected an empty directory or a head; "
            "choose another place, or force it"
        )
