"""Atomic writes of files and directories (write to a temporary path, then rename), and checks by size and hash."""

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
UNFINISHED = ".part"  # suffix of directories that are being written
SETTLED_S = 60.0  # age from which an unlocked directory is abandoned: its writer locks it at once
PREPARE_AGAIN = "delete it and prepare again"
MOST_TEXT = 2**27  # size limit of a file that is read as one text: the largest published tokenizer.json has 35 MB


class Stamp(NamedTuple):
    """Expected state of a file: its size in bytes and its SHA-256 in hexadecimal."""

    bytes: int
    sha256: str


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yield a path to write to, which replaces `file` if and only if the block ends without an error.

    Raises:
        DataError: the disk is full or the directory is not writable; `file` is unchanged.
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
    """Remove temporary files that killed writers of `file` left; no process may be writing `file` now."""
    for part in file.parent.glob(f".{file.name}.*.part"):
        part.unlink(missing_ok=True)


def make_directory(directory: Path) -> None:
    """Create the directory, with its parents.

    Raises:
        DataError: the directory cannot be created.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{directory} cannot be made ({error.strerror}); choose another directory") from error


def lock(descriptor: int, path: Path) -> None:
    """Lock a file or directory against other writers; the kernel releases the lock when the process ends.

    Args:
        descriptor: descriptor of the open file or directory.
        path: its name, for messages.

    Raises:
        ConfigError: another process has the lock.
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
    """Yield a directory to write to, which becomes `directory` if and only if the block ends without an error.

    Remnants of killed writers of the same directory are removed first.

    Args:
        replace: replace an existing directory, if it contains only files.

    Raises:
        ConfigError: the directory exists and must not be replaced.
        DataError: the disk is full or the parent is not writable; an existing directory is unchanged.
    """
    try:
        discard_unfinished(directory.parent, directory.name)
        check_replaceable(directory, replace=replace)
        directory.parent.mkdir(parents=True, exist_ok=True)
        place = directory.parent / f".{directory.name}-{secrets.token_hex(6)}{UNFINISHED}"
        made, old = place / "new", place / "old"
        try:  # the name is chosen before the directory is created: a signal between the two leaves nothing
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
    """Remove the remnants of killed writers of `new_directory` in `parent`.

    A directory that was about to be replaced is restored. Directories that another process is writing are left alone.

    Args:
        name: final name of the directories; "*" for all.
    """
    for place in parent.glob(f".{name if name == '*' else glob.escape(name)}-*{UNFINISHED}"):
        try:  # not even locked if young: its writer would fail to get the lock
            if time.time() - place.stat().st_mtime < SETTLED_S:
                continue
        except FileNotFoundError:  # another process removed it meanwhile
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
    """Raise if something exists at `directory` that must not or cannot be replaced.

    Raises:
        ConfigError: the message has the reason.
    """
    if not directory.exists():
        return
    if not replace:
        raise ConfigError(f"{directory} is there already; choose another place, or give --overwrite")
    if not directory.is_dir() or any(entry.is_dir() for entry in directory.iterdir()):
        raise ConfigError(f"{directory} is not a directory that contains only files; choose another place")


@contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Create a directory and lock it within the block. Raises as `make_directory` and `lock` do."""
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
    """JSON object in a file.

    Raises:
        DataError: the file is missing or contains no JSON object.
    """
    try:
        return json_object(file)
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}", advice="expected what `sametoken prepare` writes") from error
    except ValueError as error:
        raise DataError(f"{file} {error}", advice=PREPARE_AGAIN) from error


def dataclass_of(kind: type[T], found: Mapping[str, Any]) -> T:
    """Build a dataclass from JSON values.

    Raises:
        TypeError: a field is missing, unknown or of another type.
    """
    kind(**found)  # pydantic ignores unknown names
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
    """Tensors of a safetensors file.

    Raises:
        DataError: the file is missing or differs from its stamp.
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
        DataError: they differ; the message has the expected and the actual value.
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
    """Stamp of the concatenation of files: total size and hash."""
    size, digest = 0, hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while block := stream.read(BLOCK):
                size += len(block)
                digest.update(block)
    return Stamp(size, digest.hexdigest())


def _sync(path: Path) -> None:
    """Flush a file or directory to the disk: after a power cut, a renamed file must not be empty."""
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
    """JSON object in a file.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file contains no JSON object; the message continues a sentence that begins with its name.
    """
    return parse_object(read_text(file))


def parse_object(text: str) -> dict[str, Any]:
    """JSON object of a text.

    Raises:
        ValueError: the text is no JSON object; the message continues a sentence that begins with its name.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"({len(text.encode())} bytes) is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"holds a {type(content).__name__}, expected a JSON object")  # noqa: TRY004 - of the file
    return content


def read_text(file: Path) -> str:
    """Text of a regular file of at most MOST_TEXT bytes.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is another one; the message continues a sentence that begins with its name.
    """
    check_regular(file)
    if (size := file.stat().st_size) > MOST_TEXT:
        raise ValueError(f"has {size} bytes, expected at most {MOST_TEXT}")
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"({size} bytes) is not UTF-8 ({error})") from error


def check_regular(file: Path) -> None:
    """Raise for pipes and devices, which could block or be endless.

    Raises:
        OSError: there is no such file, or it is a directory.
        ValueError: it is a pipe or device; the message continues a sentence that begins with its name.
    """
    mode = file.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
    if not stat.S_ISREG(mode):
        raise ValueError("is a pipe, a device or a socket, expected a regular file")
