"""Writes a head to a directory as an engine reads it: everything or nothing."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from sametoken.errors import CheckpointError, ConfigError, UnsupportedModelError, unknown_name
from sametoken.heads.files import HEAD_FILES
from sametoken.heads.kind import NO_SUCH_DRAFTS, Head, Written
from sametoken.heads.layouts import ENGINES, advice, lay_out, refusals
from sametoken.heads.read import is_head
from sametoken.heads.registry import head_kind
from sametoken.model.config import ModelConfig
from sametoken.model.linear import Linear


def write_head(
    head: Head,
    directory: Path,
    target: ModelConfig,
    *,
    layout: str = "hf",
    target_name: str,
    dtype: torch.dtype | None = None,
    force: bool = False,
) -> tuple[str, ...]:
    """Writes a head for an engine, all of it or nothing.

    Args:
        head: with plain, unpacked linears.
        directory: is made, or replaced if it is empty or holds a head and nothing else.
        target: facts of the model it drafts for, and `target_name` its name for whoever reads the file.
        layout: a key of `heads.layouts.ENGINES`.
        dtype: of the stored weights, by default the head's own.
        force: write into a directory that holds other files, which stay.

    Returns:
        What to know when serving it.

    Raises:
        UnsupportedModelError: the engine does not compute some part of the head.
        CheckpointError: the directory holds other files, or cannot be written.
    """
    if layout not in ENGINES:
        raise ConfigError(unknown_name("layout", layout, ENGINES))
    if any(isinstance(part, Linear) and (part.packed or part.native or part.stored) for part in head.modules()):
        raise CheckpointError("the head is packed for serving; read it with pack=False to write it")
    written = lay_out(head, target, layout, target_name)
    full = lay_out(head, target, "hf", target_name).tensors if layout == "vllm" else None
    reasons = refusals(head.config, layout, full)
    if reasons == [NO_SUCH_DRAFTS]:
        title = head_kind(head.config).title(head.config)
        raise UnsupportedModelError(
            f"{ENGINES[layout]} has no {title} drafts, so it cannot run this head; serve it with sametoken"
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
    for key, tensor in written.tensors.items():
        written.tensors[key] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    _replace(directory, written, force)
    return advice(head.config, layout)


def _replace(directory: Path, written: Written, force: bool) -> None:
    """Writes everything beside its place first; a full disk leaves what was there."""
    try:
        _check_place(directory, force)
        new = not directory.exists()
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".head-", dir=directory.parent if new else directory) as place:
            made = Path(place) / "head"
            _fill(made, written)
            if new:
                made.rename(directory)
            else:
                _move(made, directory, written.file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{directory} cannot be written ({error}); check the free space and the permissions"
        ) from error


def _check_place(directory: Path, force: bool) -> None:
    names = sorted(entry.name for entry in directory.iterdir()) if directory.exists() else []
    others = [name for name in names if name not in ("config.json", *HEAD_FILES)]
    if not force and (others or (names and not is_head(directory))):
        raise CheckpointError(
            f"{directory} holds {others[0] if others else 'a whole model'}, expected an empty directory or a head; "
            "choose another place, or force it"
        )


def _fill(made: Path, written: Written) -> None:
    made.mkdir()
    config, weights = made / "config.json", made / written.file
    config.write_text(json.dumps(written.config, indent=2) + "\n", encoding="utf-8")
    tensors = {name: tensor.contiguous().cpu() for name, tensor in written.tensors.items()}
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(config.stat().st_mode)  # safetensors lets only the owner read


def _move(made: Path, directory: Path, file: str) -> None:
    """Puts files in the place of others; a config.json that changes is absent while the weights are not its own."""
    old, new = directory / "config.json", made / "config.json"
    if old.exists() and old.read_bytes() != new.read_bytes():
        old.unlink()
    for name in HEAD_FILES:
        if name != file:
            (directory / name).unlink(missing_ok=True)
    (made / file).replace(directory / file)
    new.replace(old)
