"""Cache of packed weights: the first start writes them, later ones map them and share their memory.

An entry is a directory named by a digest of the model's files, the format and the variant of the compiled kernels. It
appears when it is complete; of several processes that write it at once, the first one succeeds. If all entries exceed a
limit, the least recently used ones are removed, unless a process is reading them.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
import shutil
import struct
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import torch

from sametoken.checkpoint.hub import cache_directory
from sametoken.checkpoint.identity import model_digest
from sametoken.checkpoint.packed_file import FACTS, packed_bytes, read_packed, write_packed
from sametoken.checkpoint.tensors import weight_files
from sametoken.errors import ConfigError, SametokenError, shown
from sametoken.files import UNFINISHED, discard_unfinished, holding, new_directory
from sametoken.kernels.cpu.library import INTERFACE
from sametoken.kernels.cpu.variant import library
from sametoken.model.decoder import Decoder

LOG = logging.getLogger("sametoken")
CACHE_VARIABLE = "SAMETOKEN_WEIGHT_CACHE"  # "0" disables the cache, another value is its directory
LIMIT_VARIABLE = "SAMETOKEN_WEIGHT_CACHE_GB"  # limit of all entries together
LIMIT_GB = 64.0
ENTRY = re.compile(r".+-[0-9a-f]{16}")  # names of entries; other directories are ignored
VERSION = 4  # of the rounding and layout of weights; INTERFACE is the version of the kernels
LEAST = 1 << 25  # weights of a model; fewer are packed in a moment
FREE_SHARE = 0.5  # of the free disk space, for one entry
NICENESS = 5  # of the writing threads, so that computing comes first
_writers: list[threading.Thread] = []


def weights_directory() -> Path | None:
    """Directory of the entries, which may not exist yet; None if the cache is disabled."""
    given = os.environ.get(CACHE_VARIABLE, "")
    if given == "0":
        return None
    return Path(given) if given else cache_directory().parent / "sametoken" / "weights"


def limit_bytes() -> int:
    """Limit of all entries together, in bytes.

    Raises:
        ConfigError: the environment variable is no number of gigabytes.
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
    """Path of the entry for a checkpoint's packed weights, which may not exist yet; None if they are not cached.

    Args:
        numbers: number of the model's weights.

    Raises:
        CheckpointError: the weight files cannot be read.
        ConfigError: as `limit_bytes`.
    """
    root, kernels = weights_directory(), library()
    if root is None or numbers < LEAST or dtype != torch.bfloat16 or device.type != "cpu" or kernels is None:
        return None
    limit_bytes()
    # The digest covers samples of large files; a rewritten file has another time.
    times = [file.stat().st_mtime_ns for file in weight_files(directory)]
    key = f"{VERSION} {INTERFACE} {kernels.name} {quantization} {model_digest(directory)} {times}"
    name = directory.name if quantization == "none" else f"{directory.name}-{quantization}"
    return root / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def restored(decoder: Decoder, entry: Path) -> bool:
    """Fill a decoder on the meta device with the weights of an entry, which stay in the system's file cache.

    Return False if the entry is damaged or unreadable: it is removed if possible, and the decoder cannot be used.
    """
    try:
        with holding(entry, shared=True):
            with suppress(OSError):  # a directory of another user
                os.utime(entry / FACTS)
            read_packed(decoder, entry, VERSION)
    except (SametokenError, OSError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError,
            struct.error) as error:  # fmt: skip
        LOG.warning(f"{entry} cannot be used ({error}); the weights are packed again")
        discard(entry)
        return False
    return True


def exists(entry: Path) -> bool:
    """Return True if the entry is there and this user can see it."""
    return os.path.exists(entry)  # Path.exists raises for directories that cannot be read


def keep(decoder: Decoder, entry: Path) -> None:
    """Start a thread of low priority that writes the weights of a decoder; see `finish`."""
    writer = threading.Thread(target=_keep, args=(decoder, entry), name="weight cache", daemon=False)
    _writers.append(writer)
    writer.start()


def finish() -> None:
    """Wait for all threads that `keep` started."""
    while _writers:
        _writers.pop().join()


def _keep(decoder: Decoder, entry: Path) -> None:
    """Write the weights of a decoder; errors are only logged."""
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
    try:
        size = packed_bytes(decoder)
        entry.parent.mkdir(parents=True, exist_ok=True)
        if exists(entry):  # another process was faster
            return
        discard_unfinished(entry.parent)
        if not _make_room(entry.parent, size):
            return
        with new_directory(entry) as place:
            write_packed(decoder, place, VERSION)
    except (SametokenError, OSError) as error:
        if not exists(entry):  # nor has another process written it
            LOG.warning(f"packed weights are not kept for the next start ({error}); --no-weight-cache stops trying")
        return
    LOG.info(f"{entry} keeps {size / 1e9:.1f} GB of packed weights for the next start")


def discard(entry: Path) -> None:
    """Remove a damaged entry, unless another process is reading it or has removed it meanwhile."""
    with holding(entry) as alone:
        if alone:
            _remove(entry)


def _make_room(root: Path, size: int) -> bool:
    """Make room for `size` bytes by removing entries, the least recently read first; return True if they fit.

    If they cannot fit, no entry is removed, and the reason is logged.
    """
    limit, entries = limit_bytes(), sorted(_entries(root))
    total, free = size + sum(used for _, used, _ in entries), shutil.disk_usage(root).free * FREE_SHARE - size
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
            LOG.info(f"{size / 1e9:.1f} GB of packed weights are not kept for the next start: {lack}")
            return False
        for entry in chosen:
            _remove(entry)
            LOG.info(f"{entry} was removed: packed weights take {LIMIT_VARIABLE}={limit / 1e9:g} at most")
    return True


def _entries(root: Path) -> Iterator[tuple[float, int, Path]]:
    """Time of the last read, bytes and path of each entry."""
    for facts in root.glob(f"*/{FACTS}"):
        if not ENTRY.fullmatch(facts.parent.name) or facts.parent.is_symlink():
            continue
        with suppress(OSError):  # another process removes it
            used = sum(file.stat().st_size for file in facts.parent.iterdir())
            yield facts.stat().st_mtime, used, facts.parent


def _remove(entry: Path) -> None:
    """Remove an entry whose lock is held; for other processes it disappears at once.

    An entry of another user, or on a read-only file system, stays.
    """
    with (
        suppress(OSError),
        tempfile.TemporaryDirectory(prefix=f".{entry.name}-", suffix=UNFINISHED, dir=entry.parent) as place,
    ):
        entry.rename(Path(place) / "removed")
