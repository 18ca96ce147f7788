"""--cpus: on which CPUs and with how many threads a command computes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from cli_checks import Pair
from sametoken.commands.models import use_cpus
from sametoken.errors import ConfigError
from sametoken.parallel import host

GENERATE = """
import json, os, sys, threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
from sametoken.cli import main
try:
    main(["generate", sys.argv[1], "--prompt", "a", "--max-tokens", "2", *sys.argv[2:]])
except SystemExit:
    import torch
    found = [sorted(os.sched_getaffinity(int(each))) for each in os.listdir("/proc/self/task")]
    print("\\n" + json.dumps([torch.get_num_threads(), found]))
"""
pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity"), reason="this system does not let processes choose"
)


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[int]]]:
    """What a process with CPUs 0 to 7 is pinned to."""
    found: list[list[int]] = []
    monkeypatch.setattr(host, "own_cores", lambda: ["here", list(range(8))])
    monkeypatch.setattr(host, "pin", lambda cores: found.append(list(cores)))
    before = torch.get_num_threads()
    yield found
    torch.set_num_threads(before)


@pytest.mark.parametrize("how", ["--cpus", "taskset"])
def test_every_thread_stays_on_the_cpus_of_the_list(tiny_pair: Pair, how: str) -> None:
    """As under taskset, which the operating system enforces."""
    cpu, words = str(max(os.sched_getaffinity(0))), [sys.executable, "-c", GENERATE, tiny_pair.target]
    if how == "taskset" and shutil.which("taskset") is None:
        pytest.skip("there is no taskset")
    command = [*words, "--cpus", cpu] if how == "--cpus" else ["taskset", "-c", cpu, *words]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    said = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    threads, allowed = json.loads(said.splitlines()[-1])
    assert threads == 1
    assert len(allowed) > 1
    assert all(each == [int(cpu)] for each in allowed)


def test_threads_are_as_many_as_cpus_and_replicas_divide_both(pinned: list[list[int]]) -> None:
    use_cpus("0-2,6", None)
    assert torch.get_num_threads() == 4
    use_cpus("0-5", 3)
    assert torch.get_num_threads() == 3
    for part in range(2):
        use_cpus("1-5", None, part, 2)
    assert pinned == [[0, 1, 2, 6], [0, 1, 2, 3, 4, 5], [1, 2], [3, 4, 5]]
    use_cpus(None, 2)
    assert len(pinned) == 4
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    ("cpus", "said"),
    [("a", "expected numbers"), ("1-", "expected numbers"), ("3-1", "expected some of"), ("0,9", "0,1,2,3,4,5,6,7"),
     ("5", "2 replicas need")],
)  # fmt: skip
def test_lists_that_mean_nothing_here_are_refused(pinned: list[list[int]], cpus: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"--cpus {cpus}: .*{said}"):
        use_cpus(cpus, None, 0, 2)
    assert not pinned
