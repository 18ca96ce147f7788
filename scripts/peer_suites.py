"""Runs the tests that vLLM and llama.cpp have of their servers against ours, and judges what fails.

    python scripts/peer_suites.py DIR MODELS [vllm] [llama_cpp] [--only TEXT]

pip brings their sources into DIR by name, from the index that it is set to; tests/foreign/*.toml state the SHA-256,
which tests are run on which published models of MODELS (scripts/real_models.py), and why a test may fail. Nothing of
theirs is built, and of their code nothing runs but the tests. The interpreter needs pytest-asyncio and anthropic.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

SIDE = Path(__file__).resolve().parents[1] / "tests" / "foreign"  # what stands beside their tests
NAMES = ("vllm", "llama_cpp")
KINDS = {
    "purpose": "outside our purpose",
    "inside": "about the inside of theirs",
    "model": "of a model that is not at hand",
    "decision": "by our decision",
    "skill": "by the small model",
}
LEFT_OUT = ("purpose", "inside", "model")  # kinds whose tests are not run
pip = subprocess.run
BACKENDS = ("setuptools", "scikit_build_core")  # which pip would ask for metadata
INI = "[pytest]\nasyncio_mode = auto\ntimeout = 120\nfilterwarnings = ignore\n"
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


class Excuse(NamedTuple):
    """Why tests may fail.

    Attributes:
        kind: a key of `KINDS`. `reason`: one line.
        tests: ids, in which * stands for anything; an id without parameters is that of all of them.
    """

    kind: str
    reason: str
    tests: tuple[str, ...]

    def covers(self, test: str) -> bool:
        """Whether a test is among them."""
        return any(pattern(each).fullmatch(test) for each in self.tests)


class Suite(NamedTuple):
    """The tests of one peer.

    Attributes:
        name: of its file. `requirement`: what pip brings. `sha256`: of the archive.
        copies: places in the archive, and where they are put.
        root: where tests are collected, below DIR/name; `files`: in it.
        models: by the name that a test uses, the file or directory of MODELS.
        emptied: files of which nothing is taken.
        loosened: by file, what stands in it and what is put in its place, for what holds of the peer's own model alone.
        excuses: why tests may fail.
    """

    name: str
    requirement: str
    sha256: str
    copies: Mapping[str, str]
    root: str
    files: tuple[str, ...]
    models: Mapping[str, str]
    emptied: tuple[str, ...]
    loosened: Mapping[str, Mapping[str, str]]
    excuses: tuple[Excuse, ...]

    @classmethod
    def read(cls, file: Path) -> Suite:
        """A suite from its file.

        Raises:
            SystemExit: an excuse is of no kind, has no reason or several lines.
        """
        said = tomllib.loads(file.read_text(encoding="utf-8"))
        excuses = tuple(Excuse(each["kind"], each["reason"], tuple(each["tests"])) for each in said.pop("excused", ()))
        for excuse in excuses:
            if excuse.kind not in KINDS or not excuse.reason.strip() or "\n" in excuse.reason:
                expected = f"a kind of {', '.join(KINDS)} and a reason of one line"
                raise SystemExit(f"error: {file.name}: {excuse.tests[:1]}: expected {expected}")
        said |= {name: tuple(said.get(name, ())) for name in ("files", "emptied")}
        said.setdefault("loosened", {})
        return cls(name=file.stem, excuses=excuses, **said)

    def left_out(self) -> list[str]:
        """Expressions of the ids of tests that are not run."""
        return [pattern(test).pattern for each in self.excuses if each.kind in LEFT_OUT for test in each.tests]

    def leaves_out(self, test: str) -> bool:
        """Whether a test is not run."""
        return any(each.kind in LEFT_OUT and each.covers(test) for each in self.excuses)


class Verdict(NamedTuple):
    """What became of the tests of a suite.

    Attributes:
        passed: how many. `excused`: how many failed with an excuse, by its kind.
        failed: those that have no excuse. `idle`: excuses, by their first test, of which no test failed.
    """

    passed: int
    excused: Mapping[str, int]
    failed: tuple[str, ...]
    idle: tuple[str, ...]

    @property
    def within(self) -> int:
        """Tests that are within our purpose."""
        return self.passed + sum(self.excused.values()) + len(self.failed)

    def words(self, name: str) -> str:
        """A line about it."""
        rest = "".join(f", {count} fail {KINDS[kind]}" for kind, count in sorted(self.excused.items()))
        return (
            f"{name}: {self.passed} of {self.within} within our purpose pass{rest}; {len(self.failed)} fail unexcused"
        )


def pattern(test: str) -> re.Pattern[str]:
    """The expression of an id or of several, see `Excuse`."""
    words = ".*".join(map(re.escape, test.split("*")))
    return re.compile(words if "[" in test else words + r"(\[.*\])?", re.DOTALL)


def judge(suite: Suite, outcomes: Mapping[str, str]) -> Verdict:
    """Judges the outcomes of tests by the excuses of their suite; what was skipped or left out counts for nothing."""
    excused, failed, needed = Counter[str](), list[str](), set[Excuse]()
    counted = {test: outcome for test, outcome in outcomes.items() if not suite.leaves_out(test)}
    for test in (test for test, outcome in counted.items() if outcome == FAILED):
        excuse = next((each for each in suite.excuses if each.covers(test)), None)
        if excuse is None:
            failed.append(test)
        else:
            excused[excuse.kind] += 1
            needed.add(excuse)
    idle = (each.tests[0] for each in suite.excuses if each.kind not in LEFT_OUT and each not in needed)
    return Verdict(list(counted.values()).count(PASSED), dict(excused), tuple(failed), tuple(idle))


def read_outcomes(lines: Iterable[str]) -> dict[str, str]:
    """What became of each test, from the lines that the plugin `outcomes` writes: of a test run twice the better."""
    found: dict[str, str] = {}
    for line in lines:
        said = json.loads(line)
        if found.get(said["test"]) != PASSED:
            found[said["test"]] = said["outcome"]
    return found


def fetch(suite: Suite, place: Path) -> Path:
    """The folder with what is copied from a suite's sources, which pip brings unless they are there.

    Raises:
        SystemExit: pip does not bring an archive of that SHA-256.
    """
    folder, mark = place / suite.name, place / suite.name / "fetched"
    made = repr((suite.sha256, suite.copies, suite.emptied, suite.loosened))
    if mark.is_file() and mark.read_text(encoding="utf-8") == made:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place) as temporary:
        work = Path(temporary)
        for backend in BACKENDS:  # metadata would be made by code of the archive
            (work / "none" / backend).mkdir(parents=True)
            (work / "none" / backend / "__init__.py").write_text("raise ImportError('sources only')\n")
        asked = work / "requirements.txt"
        asked.write_text(f"{suite.requirement} --hash=sha256:{suite.sha256}\n")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "--no-clean"]
        command += ["--no-build-isolation", "--dest", str(work / "archives"), "-r", str(asked)]
        env = {**os.environ, "TMPDIR": temporary, "PYTHONPATH": str(work / "none")}
        done = pip(command, env=env, capture_output=True, text=True, check=False)
        first = next(iter(suite.copies))
        found = next(
            (each.parent for each in work.glob("pip-download-*/*/PKG-INFO") if (each.parent / first).exists()), None
        )
        if found is None or "DO NOT MATCH THE HASHES" in done.stderr:
            raise SystemExit(
                f"error: pip brought no sources of {suite.requirement}:\n{done.stdout}{done.stderr}"[-2000:]
            )
        for source, target in suite.copies.items():
            shutil.copytree(found / source, folder / target)
    for name in suite.emptied:
        (folder / suite.root / name).write_text("")
    for name, changes in suite.loosened.items():
        loosen(folder / suite.root / name, changes)
    mark.write_text(made, encoding="utf-8")
    return folder


def loosen(file: Path, changes: Mapping[str, str]) -> None:
    """Puts something else into the place of texts of a file.

    Raises:
        SystemExit: one of them is not there.
    """
    text = file.read_text(encoding="utf-8")
    for old, new in changes.items():
        if old not in text:
            raise SystemExit(f"error: {file} has no {old!r}; correct `loosened`")
        text = text.replace(old, new)
    file.write_text(text, encoding="utf-8")


def run(suite: Suite, place: Path, models: Path, only: str = "") -> dict[str, str]:
    """Runs a suite and returns what became of each test.

    Args:
        only: a part of the ids of the tests that are run, "" for all.
    """
    folder = fetch(suite, place).resolve()
    named = folder / "named"  # the working directory of servers: a name is a path of the model
    for name, model in suite.models.items():
        link = named / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to((models / model).resolve(strict=True))
    results, options = (
        folder / "outcomes.jsonl",
        ["-p", "outcomes", "-p", f"{suite.name}_side", "-p", "no:cacheprovider"],
    )
    results.write_text("")
    (folder / suite.root / "pytest.ini").write_text(INI)
    files = [str(folder / suite.root / each) for each in suite.files]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        str(folder / suite.root / "pytest.ini"),
        "-q",
        "--tb=short",
        *options,
        *files,
    ]
    path = os.pathsep.join(filter(None, (str(SIDE), os.environ.get("PYTHONPATH", ""))))
    env = {
        **os.environ, "PYTHONPATH": path, "PEER_OUTCOMES": str(results), "PEER_ONLY": only,
        "PEER_LEFT_OUT": json.dumps(suite.left_out()), "PEER_NAMED": str(named), "PEER_FOLDER": str(folder),
        "HF_HUB_OFFLINE": "1", "SAMETOKEN": _program(),
    }  # fmt: skip
    with (folder / "log.txt").open("w", encoding="utf-8") as log:
        subprocess.run(command, cwd=folder / suite.root, env=env, stdout=log, stderr=subprocess.STDOUT, check=False)
    return read_outcomes(results.read_text(encoding="utf-8").splitlines())


def _program() -> str:
    """`sametoken` beside the interpreter that has the package installed."""
    return os.environ.get("SAMETOKEN") or str(Path(".venv/bin/sametoken").absolute())


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the suites and ends with 1 where a test fails without an excuse, or none ran."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("place", type=Path)
    parser.add_argument("models", type=Path)
    parser.add_argument("suites", nargs="*", help=f"some of {', '.join(NAMES)}; without one, all")
    parser.add_argument("--only", default="", help="a part of the ids of the tests that are run")
    chosen = parser.parse_args(arguments)
    if unknown := set(chosen.suites).difference(NAMES):  # argparse's own choices refuse an empty list
        parser.error(f"got {', '.join(sorted(unknown))}, expected {' or '.join(NAMES)}")
    bad = False
    for name in chosen.suites or NAMES:
        suite = Suite.read(SIDE / f"{name}.toml")
        outcomes = run(suite, chosen.place, chosen.models, chosen.only)
        verdict = judge(suite, outcomes)
        for test in verdict.failed:
            print(f"FAILED {test}")
        for test in () if chosen.only else verdict.idle:
            print(f"no longer needed in {name}.toml: the excuse of {test}")
        print(verdict.words(name), flush=True)
        log = chosen.place / name / "log.txt"
        if verdict.failed or not verdict.passed:
            bad = True
            print(f"see {log}" if outcomes else f"no test ran; see {log}")
    raise SystemExit(bad)


if __name__ == "__main__":
    main()
