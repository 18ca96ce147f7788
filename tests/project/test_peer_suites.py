"""What judges the peers' own tests: excuses, verdicts, sources by their hash. No network and no model is needed."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peer_suites
import pytest
from peer_suites import Excuse, Suite, judge, loosen, read_outcomes

TEXT = """
requirement = "peer==1.0"
sha256 = "00"
root = "tests"
files = ["test_a.py"]
[copies]
"tests" = "tests"
[models]
"owner/name" = "model"
[[excused]]
kind = "skill"
reason = "The model counts badly."
tests = ["test_a.py::test_counts", "test_a.py::test_each[*-auto]"]
[[excused]]
kind = "purpose"
reason = "It is about pictures."
tests = ["test_a.py::*image*"]
"""


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    file = tmp_path / "peer.toml"
    file.write_text(TEXT)
    return Suite.read(file)


def test_tests_fail_only_where_they_have_an_excuse(suite: Suite) -> None:
    outcomes = {
        "test_a.py::test_counts[1]": "failed",
        "test_a.py::test_counts_more": "failed",
        "test_a.py::test_each[x[0]-auto]": "failed",
        "test_a.py::test_each[x-none]": "failed",
        "test_a.py::test_image": "failed",
        "test_a.py::test_says": "passed",
        "test_a.py::test_later": "skipped",
    }
    verdict = judge(suite, outcomes)
    assert verdict.failed == ("test_a.py::test_counts_more", "test_a.py::test_each[x-none]")
    assert (verdict.passed, verdict.excused, verdict.idle) == (1, {"skill": 2}, ())  # one is not run at all
    assert verdict.within == 5
    assert verdict.words("peer") == (
        "peer: 1 of 5 within our purpose pass, 2 fail by the small model; 2 fail unexcused"
    )


def test_tests_outside_our_purpose_are_not_run(suite: Suite) -> None:
    left_out = [re.compile(each) for each in suite.left_out()]
    for test, is_left_out in (("test_a.py::test_image[1]", True), ("test_a.py::test_counts", False)):
        assert suite.leaves_out(test) is is_left_out
        assert any(each.fullmatch(test) for each in left_out) is is_left_out


def test_an_excuse_that_nothing_needs_is_named(suite: Suite) -> None:
    assert judge(suite, {"test_a.py::test_counts": "passed"}).idle == ("test_a.py::test_counts",)


def test_of_a_test_that_ran_twice_the_better_counts() -> None:
    lines = [f'{{"test": "{name}", "outcome": "{outcome}"}}' for name, outcome in (
        ("a", "failed"), ("a", "passed"), ("b", "passed"), ("b", "failed"), ("c", "failed"),
    )]  # fmt: skip
    assert read_outcomes(lines) == {"a": "passed", "b": "passed", "c": "failed"}


@pytest.mark.parametrize("wrong", [("skill", "luck"), ("The model counts badly.", " "), ("badly.", "badly.\\n")])
def test_an_excuse_has_a_kind_and_a_reason_of_one_line(wrong: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "peer.toml").write_text(TEXT.replace(*wrong, 1))
    with pytest.raises(SystemExit, match="a kind of purpose, inside, model, decision, skill and a reason of one line"):
        Suite.read(tmp_path / "peer.toml")


@pytest.mark.parametrize("name", peer_suites.NAMES)
def test_the_suites_of_the_peers_can_be_read(name: str) -> None:
    suite = Suite.read(peer_suites.SIDE / f"{name}.toml")
    assert len(suite.sha256) == 64
    assert suite.excuses
    listed = [test for excuse in suite.excuses for test in excuse.tests]
    assert len(listed) == len(set(listed))
    begun = [test.split("*")[0].partition("::")[0] for test in listed]
    assert [each for each in begun if not any(file.startswith(each) for file in suite.files)] == []
    assert all(isinstance(excuse, Excuse) and excuse.reason.endswith(".") for excuse in suite.excuses)


def test_texts_of_a_test_are_replaced_or_missed(tmp_path: Path) -> None:
    file = tmp_path / "test_a.py"
    file.write_text("assert n == count\nassert m == count\n")
    loosen(file, {"== count": "> 0"})
    assert file.read_text() == "assert n > 0\nassert m > 0\n"
    with pytest.raises(SystemExit, match="correct `loosened`"):
        loosen(file, {"== count": "> 0"})


def as_pip(work: Callable[[Path], None], error: str = "") -> Callable[..., subprocess.CompletedProcess[str]]:
    """Something in the place of pip: puts files where it unpacks them."""

    def run(command: list[str], env: dict[str, str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert "peer==1.0 --hash=sha256:00\n" in Path(command[-1]).read_text()
        work(Path(env["TMPDIR"]))
        refused = [sys.executable, "-c", "import setuptools"]  # no code of the archive runs
        assert subprocess.run(refused, env=env, capture_output=True, check=False).returncode
        return subprocess.CompletedProcess(command, 1, "", error)

    return run


def unpack(place: Path) -> None:
    source = place / "pip-download-1" / "peer_1"
    (source / "tests").mkdir(parents=True)
    (source / "PKG-INFO").write_text("Name: peer\n")
    (source / "tests" / "test_a.py").write_text("def test_says(): ...\n")


def test_sources_come_once_and_nothing_of_them_is_built(
    suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_suites, "pip", as_pip(unpack))
    folder = peer_suites.fetch(suite, tmp_path / "place")
    assert (folder / "tests" / "test_a.py").read_text() == "def test_says(): ...\n"
    assert [each.name for each in (tmp_path / "place").iterdir()] == ["peer"]
    monkeypatch.setattr(peer_suites, "pip", None)
    assert peer_suites.fetch(suite, tmp_path / "place") == folder


@pytest.mark.parametrize(
    ("work", "error"),
    [(lambda place: None, "no such package"), (unpack, "THESE PACKAGES DO NOT MATCH THE HASHES: they do not match")],
)
def test_other_sources_are_refused(
    work: Callable[[Path], None], error: str, suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_suites, "pip", as_pip(work, error))
    with pytest.raises(SystemExit, match=r"brought no sources of peer==1\.0"):
        peer_suites.fetch(suite, tmp_path / "place")


@pytest.mark.parametrize(("given", "suites"), [([], ["vllm", "llama_cpp"]), (["llama_cpp"], ["llama_cpp"])])
def test_all_suites_run_where_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], suites: list[str]
) -> None:
    ran: list[str] = []

    def run(suite: Suite, *_: object) -> dict[str, str]:
        ran.append(suite.name)
        return {"test_a.py::test_counts": "passed"}

    monkeypatch.setattr(peer_suites, "run", run)
    with pytest.raises(SystemExit) as ended:
        peer_suites.main([str(tmp_path), str(tmp_path), *given])
    assert (ended.value.code, ran) == (False, suites)


def test_a_suite_of_another_name_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        peer_suites.main([str(tmp_path), str(tmp_path), "sglang"])
    assert "got sglang, expected vllm or llama_cpp" in capsys.readouterr().err
