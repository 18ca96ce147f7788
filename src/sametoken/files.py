"""Files that are whole or not there: written beside their place and moved into it, stamped with size and hash."""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError

from sametoken.errors import ConfigError, DataError

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
BLOCK = 1 << 20
UNFINISHED = ".part"  # how the names of directories end that are being written
SETTLED_S = 60.0  # after which a directory without a lock is nobody's: who makes one locks it at once
PREPARE_AGAIN = "delete it and prepare again"
MOST_TEXT = 2**27  # bytes of a file that is read as one text: the largest published tokenizer.json has 35 MB


class Stamp(NamedTuple):
    """Expected state of a file: its size in bytes and its SHA-256 in hexadecimal."""

    bytes: int
    sha256: str


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """A path to write to, which takes the place of `file` when the block ends without an error, and only then.

    Raises:
        DataError: the disk is full or the place is not writable; what was there before still is.
    """
    # Processes of several hosts may write into one directory, and have the same number.
    part = file.with_name(f".{file.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        part.touch()
        mode = part.stat().st_mode
        yield part
        part.chmod(mode)  # safetensors writes files that only their owner can read
        _sync(part)
        os.replace(part, file)
        _sync(file.parent)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{file} cannot be written ({_reason(error)}); nothing was left half written") from error
    finally:
        part.unlink(missing_ok=True)


def discard_parts(file: Path) -> None:
    """Remove what killed processes left of `file`, which no other process may be writing now."""
    for part in file.parent.glob(f".{file.name}.*.part"):
        part.unlink(missing_ok=True)


def make_directory(directory: Path) -> None:
    """The directory, with its parents.

    Raises:
        DataError: it cannot be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{directory} cannot be made ({error.strerror}); choose another directory") from error


def lock(descriptor: int, path: Path) -> None:
    """Keep a second writer out; the kernel forgets the lock with the process, however that ends.

    Args:
        descriptor: of the open file or directory.
        path: its name, for messages.

    Raises:
        ConfigError: another process has it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"{path} is being written by another process; wait for it or choose another place") from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP):  # some network file systems have no locks
            raise


@contextmanager
def new_directory(directory: Path, *, replace: bool = False) -> Iterator[Path]:
    """A directory to write to, which becomes `directory` when the block ends without an error, and only then.

    What killed processes left of the same directory is removed first.

    Args:
        replace: it may be there already, with files alone; they are gone afterwards.

    Raises:
        ConfigError: it is there, and is not to be replaced.
        DataError: the disk is full or the place is not writable; what was there before still is.
    """
    try:
        discard_unfinished(directory.parent, directory.name)
        check_replaceable(directory, replace=replace)
        directory.parent.mkdir(parents=True, exist_ok=True)
        place = directory.parent / f".{directory.name}-{secrets.token_hex(6)}{UNFINISHED}"
        made, old = place / "new", place / "old"
        try:  # the name is known before the place is made: a signal between the two leaves nothing
            place.mkdir(mode=0o700)
            with holding(place):
                made.mkdir()
                yield made
                for file in made.iterdir():
                    _sync(file)
                try:
                    if directory.exists():
                        directory.rename(old)
                    made.rename(directory)
                finally:
                    _put_back(old, directory)
                _sync(directory.parent)
        finally:
            shutil.rmtree(place, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{directory} cannot be written ({_reason(error)}); nothing was left half written") from error


def discard_unfinished(parent: Path, name: str = "*") -> None:
    """Remove what killed processes left of directories that `new_directory` was to make in `parent`.

    One that was about to be replaced is put back. What another process is writing now is left alone.

    Args:
        name: of the directories that were to be made; "*" stands for all.
    """
    for place in parent.glob(f".{name if name == '*' else glob.escape(name)}-*{UNFINISHED}"):
        try:  # a young one is not even locked: who makes it would go without the lock
            if time.time() - place.stat().st_mtime < SETTLED_S:
                continue
        except FileNotFoundError:  # another process ended meanwhile
            continue
        with holding(place) as alone:
            if not alone:
                continue
            _put_back(place / "old", parent / place.name[1:].rpartition("-")[0])
            shutil.rmtree(place, ignore_errors=True)


def _put_back(old: Path, directory: Path) -> None:
    if old.exists() and not directory.exists():
        old.rename(directory)


@contextmanager
def holding(directory: Path, *, shared: bool = False) -> Iterator[bool]:
    """Try to lock a directory for the block, without waiting; yield True if this process has the lock.

    Args:
        shared: share the lock with other processes that do so.
    """
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError:  # another process has it, or the file system has no locks
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def check_replaceable(directory: Path, *, replace: bool) -> None:
    """Refuse a place where something is that is not to be, or cannot be replaced.

    Raises:
        ConfigError: says what is there.
    """
    if not directory.exists():
        return
    if not replace:
        raise ConfigError(f"{directory} is there already; choose another place, or give --overwrite")
    if not directory.is_dir() or any(entry.is_dir() for entry in directory.iterdir()):
        raise ConfigError(f"{directory} is not a directory that contains only files; choose another place")


@contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Make a directory and keep a second writer out of it within the block. Raises as `make_directory` and `lock`."""
    make_directory(directory)
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        lock(descriptor, directory)
        yield
    finally:
        os.close(descriptor)


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write an object, atomically. Raises DataError as `replacing` does."""
    with replacing(file) as part:
        part.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        DataError: it is missing or holds something else.
    """
    try:
        return json_object(file)
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}", advice="expected what `sametoken prepare` writes") from error
    except ValueError as error:
        raise DataError(f"{file} {error}", advice=PREPARE_AGAIN) from error


def dataclass_of(kind: type[T], found: Mapping[str, Any]) -> T:
    """A dataclass of JSON values.

    Raises:
        TypeError: a field is missing, unknown or of another type.
    """
    kind(**found)  # pydantic says nothing of names that it does not know
    try:
        return TypeAdapter(kind).validate_python(dict(found))
    except ValidationError as error:
        problem = error.errors()[0]
        name = ".".join(map(str, problem["loc"]))
        raise TypeError(f"{name} is {problem['input']!r}: {problem['msg']}") from error


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> Stamp:
    """Write a safetensors file, atomically. Raises DataError as `replacing` does."""
    from safetensors.torch import save_file

    with replacing(file) as part:
        save_file(dict(tensors), part)
        return stamp(part)


def read_tensors(file: Path, expected: Stamp) -> dict[str, Tensor]:
    """The tensors of a safetensors file.

    Raises:
        DataError: it is missing or not the file that was stamped.
    """
    from safetensors.torch import load_file

    check(file, expected)
    try:
        tensors: dict[str, Tensor] = load_file(file)
    except (SafetensorError, OSError) as error:
        raise DataError(f"{file}: not readable as safetensors ({error})", advice=PREPARE_AGAIN) from error
    return tensors


def check(file: Path, expected: Stamp) -> None:
    """Compare a file with its stamp.

    Raises:
        DataError: with what was expected and what was found.
    """
    try:
        size = file.stat().st_size
        if size != expected.bytes:
            raise DataError(f"{file}: found {size} bytes, expected {expected.bytes}", advice=PREPARE_AGAIN)
        found = stamp(file)
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}, expected {expected.bytes} bytes", advice=PREPARE_AGAIN) from error
    if found != expected:
        raise DataError(
            f"{file}: found SHA-256 {found.sha256[:16]}..., expected {expected.sha256[:16]}...", advice=PREPARE_AGAIN
        )


def stamp(*files: Path) -> Stamp:
    """Size and hash of files, one after the other."""
    size, digest = 0, hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while block := stream.read(BLOCK):
                size += len(block)
                digest.update(block)
    return Stamp(size, digest.hexdigest())


def _sync(path: Path) -> None:
    """To the disk itself: a rename that outlives its content in a power cut would leave an empty file."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:  # directories cannot be synchronised everywhere
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(handle)


def _reason(error: Exception) -> str:
    return str((error.strerror if isinstance(error, OSError) else None) or error)


def json_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds something else; the message goes on after the file's name.
    """
    text = read_text(file)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"({len(text.encode())} bytes) is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"holds a {type(content).__name__}, expected a JSON object")  # noqa: TRY004 - of the file
    return content


def read_text(file: Path) -> str:
    """The text of a regular file of at most MOST_TEXT bytes.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds something else; the message goes on after the file's name.
    """
    check_regular(file)
    if (size := file.stat().st_size) > MOST_TEXT:
        raise ValueError(f"has {size} bytes, expected at most {MOST_TEXT}")
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"({size} bytes) is not UTF-8 ({error})") from error


def check_regular(file: Path) -> None:
    """Refuse pipes and devices, which would be waited for, or read until memory ends.

    Raises:
        OSError: there is no such file, or it is a directory.
        ValueError: it is one of them; the message goes on after the file's name.
    """
    mode = file.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
    if not stat.S_ISREG(mode):
        raise ValueError("is a pipe, a device or a socket, expected a regular file")
