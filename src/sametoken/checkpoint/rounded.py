"""Weights that `quantization` rounded, kept beside the Hub's cache: the second start reads them instead of searching.

An entry is a directory named by the content of the model's files, the format and the interface of the compiled kernels.
It appears when it is whole; several processes may write it at once, and the first one stays. Where all entries would
take more than a limit, those that were read longest ago are removed, unless a process is reading them.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import torch

from sametoken.checkpoint.hub import cache_directory
from sametoken.checkpoint.identity import model_digest
from sametoken.checkpoint.shards import Shards
from sametoken.checkpoint.tensors import read_tensors, weight_files
from sametoken.errors import CheckpointError, ConfigError, SametokenError, shown
from sametoken.files import UNFINISHED, discard_unfinished, holding, new_directory, write_json
from sametoken.kernels.cpu.library import INTERFACE
from sametoken.kernels.cpu.memory import settled
from sametoken.kernels.cpu.variant import library
from sametoken.model.decoder import Decoder
from sametoken.model.linear import Embedding, Linear

LOG = logging.getLogger("sametoken")
CACHE_VARIABLE = "SAMETOKEN_QUANTIZATION_CACHE"  # "0" switches it off, another value is its directory
LIMIT_VARIABLE = "SAMETOKEN_QUANTIZATION_CACHE_GB"  # that all entries take together
LIMIT_GB = 64.0
FACTS = "entry.json"  # its time of change is that of the last start that read the entry
ENTRY = re.compile(r".+-[0-9a-f]{16}")  # names of entries: others' directories are not looked at
VERSION = 2  # of how weights are rounded and lie; INTERFACE stands for what the kernels expect of them
LEAST = 1 << 25  # numbers of a model; fewer are rounded in a second
FILE_BYTES = 256 << 20
FREE_BYTES = 1 << 30  # that an entry leaves on the disk


def rounded_directory() -> Path | None:
    """Where entries are kept, whether it is there yet or not; None if nothing is kept."""
    given = os.environ.get(CACHE_VARIABLE, "")
    if given == "0":
        return None
    return Path(given) if given else cache_directory().parent / "sametoken" / "quantised"


def limit_bytes() -> int:
    """Bytes that all entries may take together.

    Raises:
        ConfigError: the environment states no number of gigabytes.
    """
    given = os.environ.get(LIMIT_VARIABLE) or str(LIMIT_GB)
    try:
        found = float(given)
    except ValueError:
        found = math.nan
    if not 0 <= found < math.inf:
        raise ConfigError(f"{LIMIT_VARIABLE} is {shown(given)}; expected a number of gigabytes, for example 20")
    return int(found * 1e9)


def entry_of(directory: Path, numbers: int, quantization: str, dtype: torch.dtype, device: torch.device) -> Path | None:
    """Where the rounded weights of a checkpoint are or will be; None where they are not kept.

    Args:
        numbers: of the model's weights.

    Raises:
        CheckpointError: the weight files cannot be read.
        ConfigError: as `limit_bytes`.
    """
    root = rounded_directory()
    if root is None or numbers < LEAST or dtype != torch.bfloat16 or device.type != "cpu" or library() is None:
        return None
    limit_bytes()
    # The digest reads samples of large files: a file that was written anew has another time.
    times = [file.stat().st_mtime_ns for file in weight_files(directory)]
    key = f"{VERSION} {INTERFACE} {quantization} {model_digest(directory)} {times}"
    return root / f"{directory.name}-{quantization}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def take_weights(decoder: Decoder) -> set[str]:
    """The parameters of a decoder on the meta device that an entry has; they are taken out of it."""
    taken = set()
    for name, linear in _rounded(decoder):
        del linear.weight
        taken.add(f"{name}.weight")
    return taken


def restore(decoder: Decoder, entry: Path) -> None:
    """Gives a decoder its rounded weights, and packs what else it has.

    Raises:
        CheckpointError: the entry is damaged.
    """
    try:
        with holding(entry, shared=True):
            with suppress(OSError):  # a directory that others wrote
                os.utime(entry / FACTS)
            parts = {item.name: settled(item.tensor) for item in read_tensors(entry)}
        for name, linear in _rounded(decoder):
            linear.restore(parts[f"{name}.data"], parts[f"{name}.scale"])
        if decoder.embed.tied:
            decoder.embed.restore(parts["embed.head.data"], parts["embed.head.scale"])
    except (CheckpointError, OSError, KeyError, ValueError) as error:
        raise CheckpointError(f"is damaged ({error})", field=str(entry)) from error
    for module in decoder.modules():
        if isinstance(module, Linear | Embedding):
            module.pack()


def keep(decoder: Decoder, entry: Path) -> None:
    """Writes a decoder's rounded weights; what prevents it is logged and changes nothing else."""
    parts = {
        f"{name}.{part}": tensor
        for name, linear in _rounded(decoder)
        if linear.native is not None
        for part, tensor in zip(("data", "scale"), linear.native.kept, strict=False)
    }
    size = sum(tensor.nbytes for tensor in parts.values())
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        if entry.exists():  # another process was faster, and nothing needs to make room
            return
        discard_unfinished(entry.parent)
        if not _make_room(entry.parent, size):
            return
        with new_directory(entry) as place:
            shards = Shards(place, FILE_BYTES)
            for name, tensor in parts.items():
                shards.add(name, tensor)
            shards.finish()
            write_json(place / FACTS, {"bytes": size, "version": VERSION})
    except (SametokenError, OSError) as error:
        if not entry.exists():  # another process was not faster either
            LOG.warning(f"quantised weights are not kept for the next start ({error}); {CACHE_VARIABLE}=0 stops trying")
        return
    LOG.info(f"{entry} keeps {size / 1e9:.1f} GB of quantised weights for the next start")


def discard(entry: Path) -> None:
    """Removes a damaged entry, unless another process is reading it or has removed it meanwhile."""
    with holding(entry) as alone:
        if alone:
            _remove(entry)


def _make_room(root: Path, size: int) -> bool:
    """Whether `size` bytes more fit; entries are removed for them, the one that was read longest ago first.

    None is removed if they do not fit all the same, which is logged.
    """
    limit, entries = limit_bytes(), sorted(_entries(root))
    total, free = size + sum(used for _, used, _ in entries), shutil.disk_usage(root).free - size - FREE_BYTES
    with ExitStack() as held:
        chosen = []
        for _, used, entry in entries:
            if total <= limit:
                break
            if held.enter_context(holding(entry)):
                chosen.append(entry)
                total, free = total - used, free + used
        if total > limit or free < 0:
            lack = f"{LIMIT_VARIABLE}={limit / 1e9:g} allows no more" if total > limit else f"{root} has no room"
            LOG.warning(f"{size / 1e9:.1f} GB of quantised weights are not kept for the next start: {lack}")
            return False
        for entry in chosen:
            _remove(entry)
            LOG.info(f"{entry} was removed: quantised weights take {LIMIT_VARIABLE}={limit / 1e9:g} at most")
    return True


def _entries(root: Path) -> Iterator[tuple[float, int, Path]]:
    """When each entry was read last, its bytes and its place."""
    for facts in root.glob(f"*/{FACTS}"):
        if not ENTRY.fullmatch(facts.parent.name) or facts.parent.is_symlink():
            continue
        with suppress(OSError):  # another process removes it
            used = sum(file.stat().st_size for file in facts.parent.iterdir())
            yield facts.stat().st_mtime, used, facts.parent


def _remove(entry: Path) -> None:
    """Removes an entry whose lock is held; for others it is gone at once."""
    with (
        tempfile.TemporaryDirectory(prefix=f".{entry.name}-", suffix=UNFINISHED, dir=entry.parent) as place,
        suppress(OSError),  # a directory that others wrote
    ):
        entry.rename(Path(place) / "removed")


def _rounded(decoder: Decoder) -> Iterator[tuple[str, Linear]]:
    """The linear layers that have a format, by name."""
    for name, module in decoder.named_modules():
        if isinstance(module, Linear) and module.format is not None:
            yield name, module
