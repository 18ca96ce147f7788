"""The directories that stand for GGUF files: written once, and removed when nobody can use them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

gguf = pytest.importorskip("gguf")

from gguf import GGMLQuantizationType as Type  # noqa: E402

from gguf_makers import embedded_gguf  # noqa: E402
from sametoken.checkpoint.gguf import LINK, directory  # noqa: E402
from sametoken.checkpoint.gguf.directory import directory_of  # noqa: E402
from sametoken.errors import CheckpointError  # noqa: E402


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return embedded_gguf(tmp_path, "embedded", Type.Q8_0)[0]


def copied(file: Path, name: str) -> Path:
    file.with_name(name).write_bytes(file.read_bytes())
    return file.with_name(name)


def kept(cache: Path) -> set[Path]:
    return set(cache.iterdir())


def test_directories_of_changed_and_absent_files_are_removed(file: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    before, other = directory_of(file, cache), copied(file, "other.gguf")
    directory_of(other, cache)
    other.unlink()
    os.utime(before, (time.time() - 7200,) * 2)
    os.utime(file, (1, 1))
    after = directory_of(file, cache)
    assert after != before
    assert kept(cache) == {after}
    assert directory_of(file, cache) == after


def test_what_another_version_uses_of_the_same_file_stays(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or each of two versions that share a cache would remove what the other is about to read."""
    cache = tmp_path / "cache"
    theirs = directory_of(file, cache)
    monkeypatch.setattr(directory, "VERSION", directory.VERSION + 1)
    ours = directory_of(file, cache)
    assert kept(cache) == {theirs, ours}
    monkeypatch.undo()
    os.utime(theirs, (time.time() - 7200,) * 2)
    assert directory_of(file, cache) == theirs  # in use again, and no longer old
    assert time.time() - theirs.stat().st_mtime < 600


def test_what_a_killed_process_left_is_removed_when_it_is_old(file: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for name in (".part-old", ".part-new"):
        (cache / name).mkdir(parents=True)
    os.utime(cache / ".part-old", (time.time() - 7200,) * 2)
    assert directory_of(file, cache).exists()
    assert not (cache / ".part-old").exists()
    assert (cache / ".part-new").exists()


def test_the_directories_used_longest_ago_go_first(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "MOST", 2)
    cache = tmp_path / "cache"
    first, second = (directory_of(copied(file, f"{name}.gguf"), cache) for name in "ab")
    os.utime(second, (time.time() - 60,) * 2)
    assert directory_of(file.with_name("a.gguf"), cache) == first
    third = directory_of(copied(file, "c.gguf"), cache)
    assert kept(cache) == {first, third}


def test_a_damaged_file_leaves_nothing(file: Path, tmp_path: Path) -> None:
    cache, data = tmp_path / "cache", file.read_bytes()
    file.write_bytes(data[:-100])
    with pytest.raises(CheckpointError, match="truncated"):
        directory_of(file, cache)
    assert not cache.exists()


def test_a_damaged_file_of_the_hub_is_named_with_the_file_that_holds_its_content(file: Path, tmp_path: Path) -> None:
    blob, named = tmp_path / "blobs" / "3f2a", tmp_path / "snapshots" / "tiny-Q8_0.gguf"
    for each in (blob, named):
        each.parent.mkdir()
    blob.write_bytes(file.read_bytes()[:-100])
    named.symlink_to(blob)
    with pytest.raises(CheckpointError) as caught:
        directory_of(named, tmp_path / "cache")
    assert str(caught.value).startswith(f"{named}: truncated")
    assert str(caught.value).endswith(f"(delete {blob} first, to which it is a link)")


def test_a_full_disk_gives_a_temporary_directory(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, write = tmp_path / "cache", Path.write_text

    def full(self: Path, *args: object, **options: object) -> int:
        if cache in self.parents:
            raise OSError(28, "No space left on device")
        return write(self, *args, **options)

    monkeypatch.setattr(Path, "write_text", full)
    found = directory_of(file, cache)
    assert cache not in found.parents
    assert (found / LINK).exists()
    assert kept(cache) == set()
