"""What starts a command sooner changes nothing that it does."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from sametoken.commands import ahead
from sametoken.commands.ahead import DEVICES, LIBRARY, link_torch, starting

LINK = "from sametoken.commands.ahead import link_torch; link_torch()"
LINKED = """
import sys, threading
[thread.join() for thread in threading.enumerate() if thread is not threading.current_thread()]
assert "torch" not in sys.modules
assert "libtorch_cpu" in open("/proc/self/maps").read()
import torch
assert torch.ones(2).sum() == 2
"""


CPU_BUILD = torch.version.cuda is None and sys.platform == "linux"


def run(words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", words], capture_output=True, text=True)


@pytest.mark.skipif(not CPU_BUILD, reason="nothing is linked ahead elsewhere")
def test_torch_is_linked_before_it_is_imported() -> None:
    assert run(f"{LINK}\n{LINKED}").stderr == ""


def test_a_process_may_end_while_torch_is_linked() -> None:
    done = run(LINK)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(sys.platform != "linux", reason="nothing is linked ahead elsewhere")
@pytest.mark.parametrize("further", [(), *((name,) for name in DEVICES)], ids=str)
def test_a_build_for_gpus_is_left_to_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, further: tuple[Path, ...]
) -> None:
    begun = Mock()
    (tmp_path / "lib").mkdir()
    for name in (LIBRARY, *further):
        (tmp_path / name).touch()
    monkeypatch.setattr(ahead, "find_spec", lambda _: SimpleNamespace(submodule_search_locations=[str(tmp_path)]))
    monkeypatch.setattr(ahead, "Thread", begun)
    link_torch()
    assert begun.called is not bool(further)


def test_a_start_leaves_collection_and_turns_as_they_were() -> None:
    before = gc.isenabled(), sys.getswitchinterval()
    with starting():
        assert not gc.isenabled()
        assert sys.getswitchinterval() < before[1]
    assert (gc.isenabled(), sys.getswitchinterval()) == before


def test_objects_of_a_start_that_stay_are_not_visited_again() -> None:
    code = """if True:
        import gc
        from sametoken.commands.ahead import starting
        with starting(stays=True):
            made = [[] for _ in range(100_000)]
        print(gc.get_freeze_count() >= 100_000, gc.get_count()[0] < 10_000)
        gc.unfreeze()
        with starting():
            made = [[] for _ in range(100_000)]
        print(gc.get_freeze_count() == 0, gc.get_count()[0] < 10_000)
    """
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["True"] * 4
