"""docs/troubleshooting.md: the page is its rows, each row's words and test exist; and some of these tests."""

from __future__ import annotations

import ast
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from troubleshooting_page import PAGE, SECTIONS, Row, page

import sametoken
from head_makers import eagle_config, random_head, target_config
from sametoken import ConfigError
from sametoken.checkpoint import memory as checkpoint_memory
from sametoken.checkpoint.memory import check_memory
from sametoken.engine import load
from sametoken.errors import MemoryPlanError, SametokenError
from sametoken.heads.eagle.facts import warnings
from sametoken.parallel import meeting
from sametoken.parallel.group import RankGroup
from sametoken.parallel.place import HERE, RankPlace
from sametoken.runtime import memory

ROOT, PACKAGE = Path(__file__).parents[2], Path(sametoken.__file__).parent
ROWS = [row for rows in SECTIONS.values() for row in rows]


def test_the_page_is_its_rows() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run make troubleshooting"


@pytest.fixture(scope="module")
def texts() -> set[str]:
    """All texts of the package's source."""
    trees = (ast.parse(file.read_text(encoding="utf-8")) for file in PACKAGE.rglob("*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return {node.value for node in nodes if isinstance(node.value, str)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.symptom)
def test_a_rows_words_and_test_exist(row: Row, texts: set[str]) -> None:
    assert any(row.says in text for text in texts), f"nothing says {row.says!r} any more"
    file, _, name = row.test.partition("::")
    assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), row.test
    assert all("|" not in cell and cell for cell in (row.symptom, row.cause, row.finds, row.todo))


RUN_OUT = """
import resource
from sametoken import LLM
from sametoken.cli import main

LLM("embedded", max_batch_size=1, max_seq_len=64).generate([[5]])
size = next(line for line in open("/proc/self/status") if line.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, ((int(size.split()[1]) << 10) + (200 << 20), resource.RLIM_INFINITY))
main(["generate", "--prompt", "Hello", "--kv-cache-max-tokens", "200000"])
"""


def test_memory_that_runs_out_is_one_line() -> None:
    """A process that may take 200 MB more is asked for a cache of 1.6 GB."""
    done = subprocess.run([sys.executable, "-c", RUN_OUT], capture_output=True, text=True)
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: memory ran out: ")
    assert "`sametoken doctor MODEL` shows what fits" in last
    assert "Traceback" not in done.stderr


def test_another_runtime_error_is_not_taken_for_it(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **options: object) -> None:
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(load, "load_decoder", fail)
    with pytest.raises(RuntimeError, match="shapes differ"):
        run("generate", "--prompt", "Hello")


@pytest.mark.parametrize(("integrated", "words"), [(True, "drop_caches"), (False, "shows what fits")])
def test_cached_files_on_a_gpu_that_shares_memory(
    integrated: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(is_integrated=integrated))
    free = {"cuda": 10**9, "cpu": 10**12}
    for module in (checkpoint_memory, memory):
        monkeypatch.setattr(module, "available_bytes", lambda device: free[device.type])
    stated = SimpleNamespace(parameters=10**10, ropes=[])
    with pytest.raises(MemoryPlanError, match=words):
        check_memory("m", stated, 64, torch.bfloat16, torch.device("cuda"), "none", None)  # type: ignore[arg-type]


def test_a_machine_without_cuda(run: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    assert "has no CUDA; use 'cpu'" in run("generate", "--prompt", "Hello", "--device", "cuda").err
    assert "CUDA devices" in run("doctor").out


def test_a_rank_that_does_not_reach_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "MEET_S", 1.0)
    with socket.create_server((HERE, 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(SametokenError, match=rf"rank 1 does not reach rank 0 at 127.0.0.1:{port}.*MASTER_ADDR"):
        RankGroup(RankPlace(1, 2, 2, HERE, port), {})


def test_ranks_of_different_versions() -> None:
    """Both ranks say so."""
    first = RankGroup(RankPlace(0, 2, 2, HERE, 0), {"version": "1.0"})
    second = RankGroup(RankPlace(1, 2, 2, HERE, first.port), {"version": "1.1"})
    second.key = first.key
    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(each.connect) for each in (first, second)]:
            with pytest.raises(ConfigError, match=r"rank 1 has version 1.1 and rank 0 has 1.0; start all ranks"):
                done.result()


def test_a_head_for_fewer_positions_is_noted() -> None:
    head, target = random_head(eagle_config()), target_config()
    positions = head.config.layers.rope.max_position
    longer = replace(target, rope=replace(target.rope, max_position=8 * positions))
    same = replace(target, rope=replace(target.rope, max_position=positions))
    words = f"made for {positions} positions, the target for {8 * positions}: guesses beyond may be worse"
    assert any(words in note for note in warnings(head, longer))
    assert not any("made for" in note for note in warnings(head, same))
