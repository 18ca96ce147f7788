"""Data generation and training on a real cluster of Ray on this host. `make test-ray` runs these."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from ray_cluster import PYTHON, RayCluster, ray_cluster

from sametoken.train.dataset.prepared import Prepared
from shard_checks import SERVE, SHORT, complete, words_to_shard

pytestmark = pytest.mark.skipif(not PYTHON, reason="make test-ray runs these")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RayCluster]:
    with ray_cluster(tmp_path) as found:
        yield found


def shards(run: Any, place: Path, count: int) -> Path:
    """A directory of so many shards of two conversations each."""
    assert run(*words_to_shard(place, count)).code == 0
    return place / "shards"


def servers() -> list[int]:
    """The processes of our servers of shards."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if b"\0serve\0" in (words := (folder / "cmdline").read_bytes()) and b"--max-seq-len\0256" in words:
                found.append(int(folder.name))
    return found


def test_a_worker_that_dies_loses_nothing(run: Any, cluster: RayCluster, tmp_path: Path) -> None:
    data, answers = shards(run, tmp_path, 16), tmp_path / "answers"
    data_words = ("deploy", "ray", "synthesize", "embedded", "--data", str(data), "--shards", "16")
    words = (*data_words, "--output", str(answers))
    process = cluster.start(*words, "--workers", "2", *SHORT, *SERVE)
    deadline = time.monotonic() + 120
    while len(complete(answers)) < 4 and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    cluster.kill_node()
    said = process.communicate(timeout=200)[0]
    assert process.returncode == 0, said
    assert complete(answers) == list(range(16))
    assert said.count("exit code 0 on") == 16
    assert len(list((answers / "logs").glob("server-*.log"))) > 2, "a server was started again"
    deadline = time.monotonic() + 30
    while servers():
        assert time.monotonic() < deadline
        time.sleep(0.2)

    code, said = cluster.run(*words, *SHORT, *SERVE)
    assert code == 0
    assert "nothing is left to answer" in said

    other = (*data_words, "--output", str(tmp_path / "other"))
    code, said = cluster.run(*other, "--start", "99")
    assert (code, "has none of the shards" in said) == (2, True), said
    code, said = cluster.run(*other, "--workers", "9")
    assert (code, "9 workers need 9 CPUs and the cluster has 3" in said) == (2, True), said
    code, said = cluster.run(*other, "--workers", "1", "--serve-args", "--draft /none")
    assert (code, "error: the job of Ray failed" in said) == (2, True), said
    assert "there is no directory /none" in said


def test_hidden_states_and_training_on_two_nodes(cluster: RayCluster, tmp_path: Path) -> None:
    rows = [
        {"role": "user", "content": "Hello, how are you?"}, {"role": "assistant", "content": "I am well, thank you."}
    ]  # fmt: skip
    data = tmp_path / "answers.jsonl"
    data.write_text("\n".join(json.dumps({"conversations": rows}) for _ in range(32)))
    prepared, head = tmp_path / "prepared", tmp_path / "head"
    written = ("--data", str(data), "--output", str(prepared), "--shard-size", "64kB", "--workers", "2")
    code, said = cluster.run("deploy", "ray", "prepare", "embedded", *written)
    assert code == 0, said
    assert "part 0: exit code 0" in said
    assert "part 1: exit code 0" in said
    stored = Prepared.open(prepared).hidden_states
    assert stored is not None
    assert len(stored.shards) > 2
    assert not stored.missing()
    trained = ("--data", str(prepared), "--output-dir", str(head), "--max-steps", "2", "--device", "cpu")
    code, said = cluster.run("deploy", "ray", "train", "embedded", *trained, "--workers", "2")
    assert code == 0, said
    assert "2 nodes meet at" in said
    assert "2 steps" in said
    assert (head / "head" / "model.safetensors").exists()
