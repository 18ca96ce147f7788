"""JSON Lines file that grows by whole lines only, so that a killed run can continue.

NAME.run.json has the settings of the run that wrote the lines. A run with other settings cannot add lines.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sametoken.errors import ConfigError, DataError
from sametoken.files import lock, make_directory, write_json

FORMAT = 1
SYNC_LINES = 64
SYNC_SECONDS = 2.0
BLOCK = 1 << 16


class Lines:
    """Appender of JSON objects to a file; each write is atomic, and on disk after a short time.

    Args:
        descriptor: descriptor of a file of whole lines, opened for appending; this object takes ownership.
        path: path of the file, for messages.
    """

    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor, self.path = descriptor, path
        self._size = os.fstat(descriptor).st_size
        self._unsynced, self._synced = 0, time.monotonic()

    def append(self, entry: Mapping[str, Any]) -> None:
        """Append a line.

        Raises:
            DataError: the line cannot be written; the file is unchanged.
        """
        line = memoryview((json.dumps(entry, ensure_ascii=False) + "\n").encode())
        try:
            written = 0
            while written < len(line):
                written += os.write(self._descriptor, line[written:])
            self._unsynced += 1
            if self._unsynced >= SYNC_LINES or time.monotonic() - self._synced > SYNC_SECONDS:
                self._sync()
        except OSError as error:
            os.ftruncate(self._descriptor, self._size)
            raise DataError(
                f"{self.path} cannot be written: {error.strerror}; what it holds is whole: "
                "make room and run the same command again to go on"
            ) from error
        self._size += len(line)

    def _sync(self) -> None:
        os.fsync(self._descriptor)
        self._unsynced, self._synced = 0, time.monotonic()

    def close(self) -> None:
        """Flush to the disk and release the lock."""
        try:
            self._sync()
        except OSError as error:
            raise DataError(f"{self.path} cannot be written: {error.strerror}; run the same command again") from error
        finally:
            os.close(self._descriptor)


def settings_file(path: Path) -> Path:
    """Path of the file with the settings of a journal."""
    return path.with_name(path.name + ".run.json")


def take_up(path: Path, settings: Mapping[str, Any]) -> Lines:
    """Open a journal for appending: a new one, or an existing one with equal settings, without its torn last line.

    Args:
        settings: JSON values on which the lines depend.

    Raises:
        ConfigError: the file has other settings, was not written here, or is being written.
        DataError: the file cannot be opened or written.
    """
    descriptor = _open(path)
    try:
        lock(descriptor, path)
        if os.fstat(descriptor).st_size:
            _check_settings(path, settings)
            _cut_torn_line(descriptor)
        else:
            write_json(settings_file(path), {"format": FORMAT, "settings": settings})
        return Lines(descriptor, path)
    except OSError as error:
        os.close(descriptor)
        raise DataError(f"{path}: {error.strerror}; expected a file that can be written") from error
    except BaseException:
        os.close(descriptor)
        raise


def start_over(path: Path) -> Lines:
    """Open an empty journal, removing existing content.

    Raises:
        DataError: it cannot be written.
    """
    descriptor = _open(path)
    os.ftruncate(descriptor, 0)
    return Lines(descriptor, path)


def _open(path: Path) -> int:
    make_directory(path.parent)
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; expected a file that can be written") from error


def _check_settings(path: Path, settings: Mapping[str, Any]) -> None:
    file = settings_file(path)
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        known = kept["format"] == FORMAT
        before = dict(kept["settings"])
    except FileNotFoundError:
        raise ConfigError(
            f"{path} exists and {file.name}, which would say how it was made, does not; choose another output"
        ) from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{file} is not what was written there; move {path.name} and it away to begin again") from error
    if not known:
        raise DataError(f"{file} has format {kept['format']}, expected {FORMAT}; choose another output")
    now = json.loads(json.dumps(settings))
    for name in [*now, *(before.keys() - now.keys())]:
        if now.get(name) != before.get(name):
            raise ConfigError(
                f"{path} was begun with {name} = {json.dumps(before.get(name))}, now it is "
                f"{json.dumps(now.get(name))}; go on with the same, or choose another output"
            )


def _cut_torn_line(descriptor: int) -> None:
    """Shorten a file to its last line end."""
    end = os.fstat(descriptor).st_size
    while end:
        start = max(0, end - BLOCK)
        found = os.pread(descriptor, end - start, start).rfind(b"\n")
        if found >= 0:
            end = start + found + 1
            break
        end = start
    os.ftruncate(descriptor, end)
