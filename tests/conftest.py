"""Fixtures shared by tests that need a model on disk: tiny, random, made once per run."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():  # Triton's kernels run in its interpreter; read when triton is imported first
    os.environ.setdefault("TRITON_INTERPRET", "1")

import tiny_models
from cli_checks import Pair, call, make_pair
from matrix import cover
from sametoken.engine.load import note_missing_kernels
from sametoken.errors import ConfigError, UnsupportedModelError
from sametoken.train import journal

DRAW = journal.draw

COMPLETE = ("SAMETOKEN_CLIENTS", "SAMETOKEN_DISTRIBUTED")  # set by `make clients` and `make test-distributed`


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before -m chooses."""
    cover(items)


def _fail_if_skipped(report: pytest.CollectReport | pytest.TestReport) -> None:
    """Makes a skip a failure where make has brought all that its tests might miss."""
    if any(map(os.environ.get, COMPLETE)) and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Of whole files."""
    report = yield
    _fail_if_skipped(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None]:
    """Skips what CUDA refuses: the tests of its families and formats are those of a CPU."""
    with _refusals_skip():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None]:
    """As in the set-up."""
    with _refusals_skip():
        yield


@contextmanager
def _refusals_skip() -> Iterator[None]:
    try:
        yield
    except (ConfigError, UnsupportedModelError) as error:
        if tiny_models.DEVICE != "cpu" and ("on CUDA; use --device cpu" in str(error) or "CPU only" in str(error)):
            pytest.skip(str(error))
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Of single tests."""
    report = yield
    _fail_if_skipped(report)
    return report


@pytest.fixture(scope="session", autouse=True)
def kernels_noted() -> None:
    """Without compiled kernels a note is printed once; here, so that no test finds it in its output."""
    note_missing_kernels()


@pytest.fixture(scope="session", autouse=True)
def no_curves() -> Iterator[None]:
    """Runs of training in this process draw no picture: it takes longer than their few steps. See `curves`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "draw", lambda entries, file: None)
        yield


@pytest.fixture
def curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that look at the picture of a run."""
    monkeypatch.setattr(journal, "draw", DRAW)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Torch on one thread, for models so small that a second one only waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A tiny target and another draft; their tokens are letters."""
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that nobody else uses, as `bench` sees it: from a busy one it draws no conclusions."""
    monkeypatch.setattr("sametoken.bench.record.load_average", lambda: 0.0)


@pytest.fixture
def pair(tiny_pair: Pair) -> Pair:
    """The same by its short name."""
    return tiny_pair


@pytest.fixture(scope="session")
def tiny_llm_dir(tiny_pair: Pair) -> Path:
    """The target of the pair."""
    return Path(tiny_pair.target)


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Any:
    """Runs the command line in this process."""
    return lambda *arguments: call(capfd, *arguments)
