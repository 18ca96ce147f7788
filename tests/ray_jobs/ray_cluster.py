"""A cluster of Ray on this host, in a process of its own: a head without work, and two nodes, one of which may die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

PYTHON = os.environ.get("SAMETOKEN_RAY", "")  # where both packages are
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0",
}  # fmt: skip
STORE_BYTES = 80 << 20


class RayCluster(NamedTuple):
    """A cluster that runs."""

    address: str
    process: subprocess.Popen[str]
    environ: dict[str, str]

    def start(self, *words: str) -> subprocess.Popen[str]:
        """A command of ours that uses the cluster; both outputs are one."""
        return subprocess.Popen(
            [PYTHON, "-m", "sametoken.cli", *words, "--address", self.address], env=self.environ, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, *words: str) -> tuple[int, str]:
        """Exit code and output of a command."""
        process = self.start(*words)
        said = process.communicate(timeout=240)[0]
        return process.returncode, said

    def kill_node(self) -> None:
        """Ends a node with what runs on it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("kill\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "killed\n"


@contextmanager
def ray_cluster(place: Path) -> Iterator[RayCluster]:
    """A cluster that takes jobs, and that leaves nothing behind."""
    environ = {**os.environ, **QUIET, "TMPDIR": "/tmp", "PLACE": str(place)}
    with (place / "cluster.log").open("w") as log:
        process = subprocess.Popen(
            [PYTHON, __file__], env=environ, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            start_new_session=True,
        )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        assert address, (place / "cluster.log").read_text()
        yield RayCluster(address, process, environ)
    finally:
        process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()
        process.wait()


def main() -> None:
    """The process of the cluster: nodes end when a line or the end of standard input says so."""
    from ray.cluster_utils import Cluster

    common = {"object_store_memory": STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **common})
    nodes = [cluster.add_node(num_cpus=3, object_store_memory=STORE_BYTES) for _ in range(2)]
    print(cluster.address, flush=True)
    for _ in sys.stdin:
        cluster.remove_node(nodes.pop(), allow_graceful=False)
        print("killed", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
