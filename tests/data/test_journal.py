"""The journal: whole lines whatever happens to it, one writer, one set of settings."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from sametoken.data.journal import Lines, settings_file, start_over, take_up
from sametoken.errors import ConfigError, DataError

SETTINGS = {"model": "a", "temperature": 0.5}
ROWS = [{"id": n, "text": "é" * n} for n in range(4)]


def begin(path: Path) -> bytes:
    lines = take_up(path, SETTINGS)
    for row in ROWS:
        lines.append(row)
    lines.close()
    return path.read_bytes()


def test_lines_are_appended_whole_and_after_a_restart_too(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.jsonl"
    content = begin(path)
    assert [json.loads(line) for line in content.splitlines()] == ROWS
    assert begin(path) == content * 2


@pytest.mark.parametrize("tail", [b"", b"\x00" * 5, b"x" * 70_000])
def test_wherever_the_last_line_was_torn_it_is_cut_and_no_other(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "out.jsonl"
    content = begin(path)
    for end in range(1, len(content) + 1):
        path.write_bytes(content[:end] + tail)
        take_up(path, SETTINGS).close()
        assert path.read_bytes() == content[: content[:end].rfind(b"\n") + 1]


def test_other_settings_are_named_and_nothing_is_touched(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(begin(path) + b"torn")
    with pytest.raises(ConfigError, match=r"temperature = 0\.5, now it is 0\.7"):
        take_up(path, {**SETTINGS, "temperature": 0.7})
    with pytest.raises(ConfigError, match=r'begun with model = "a", now it is null'):
        take_up(path, {"temperature": 0.5})
    assert path.read_bytes().endswith(b"torn")


def test_a_file_that_is_none_of_ours_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("precious")
    with pytest.raises(ConfigError, match=r"out\.jsonl exists and out\.jsonl\.run\.json"):
        take_up(path, SETTINGS)
    settings_file(path).write_text('{"format": 1')
    with pytest.raises(DataError, match="not what was written"):
        take_up(path, SETTINGS)
    settings_file(path).write_text('{"format": 2, "settings": {}}')
    with pytest.raises(DataError, match="format 2, expected 1"):
        take_up(path, SETTINGS)
    assert path.read_text() == "precious"


def test_settings_without_a_line_bind_nobody(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    take_up(path, SETTINGS).close()
    take_up(path, {"model": "b"}).close()
    assert json.loads(settings_file(path).read_text())["settings"] == {"model": "b"}


def test_a_second_writer_is_refused_until_the_first_is_done(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first = take_up(path, SETTINGS)
    with pytest.raises(ConfigError, match="written by another process"):
        take_up(path, SETTINGS)
    first.close()
    take_up(path, SETTINGS).close()


def test_a_full_disk_leaves_what_is_there_whole(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    content = begin(path)
    lines = take_up(path, SETTINGS)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(content) + 100, hard))  # the system writes 100 bytes, then refuses
    try:
        with pytest.raises(DataError, match=r"out\.jsonl cannot be written: File too large; what it holds is whole"):
            lines.append({"text": "x" * 200})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == content
    lines.append(ROWS[0])
    lines.close()
    assert len(path.read_bytes().splitlines()) == len(ROWS) + 1


def test_paths_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="Is a directory; expected a file that can be written"):
        take_up(tmp_path, SETTINGS)
    with pytest.raises(DataError, match="cannot be made"):
        take_up(tmp_path / "file" / "out.jsonl", SETTINGS)


def test_starting_over_empties(tmp_path: Path) -> None:
    path = tmp_path / "failed.jsonl"
    path.write_text("old")
    lines: Lines = start_over(path)
    lines.append({"id": 1})
    lines.close()
    assert path.read_text() == '{"id": 1}\n'
