"""What starts a command sooner changes nothing that it does."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from sametoken.commands.ahead import starting

LINK = "from sametoken.commands.ahead import link_torch; link_torch()"
LINKED = """
import sys, threading
[thread.join() for thread in threading.enumerate() if thread is not threading.current_thread()]
assert "torch" not in sys.modules
assert "libtorch_cpu" in open("/proc/self/maps").read()
import torch
assert torch.ones(2).sum() == 2
"""


def run(words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", words], capture_output=True, text=True)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is linked ahead")
def test_torch_is_linked_before_it_is_imported() -> None:
    assert run(f"{LINK}\n{LINKED}").stderr == ""


def test_a_process_may_end_while_torch_is_linked() -> None:
    done = run(LINK)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_start_leaves_collection_and_turns_as_they_were() -> None:
    before = gc.isenabled(), sys.getswitchinterval()
    with starting():
        assert not gc.isenabled()
        assert sys.getswitchinterval() < before[1]
    assert (gc.isenabled(), sys.getswitchinterval()) == before
