"""A cluster of Slurm on this host: a controller and several nodes, each a slurmd of its own."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

NODES = ("n1", "n2", "n3", "n4")
PATIENCE_S = 60.0
SECRET_BYTES = 128
CONFIGURATION = """ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={place}/munge.socket
CryptoType=crypto/munge
CommunicationParameters=NoAddrCache,NoInAddrAny
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmctldPort={first}
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd.%n.pid
SlurmdSpoolDir={place}/spool.%n
StateSaveLocation={place}/state
SlurmctldLogFile={place}/slurmctld.log
SlurmdLogFile={place}/slurmd.%n.log
SwitchType=switch/none
SlurmctldTimeout=30
SlurmdTimeout=30
KillWait=5
SlurmdParameters=config_overrides
NodeName=n[1-4] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{second}-{last}] CPUs=2 RealMemory=8000 State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def reason_to_skip() -> str:
    """Why there can be no cluster here, "" where there can be one."""
    if not os.environ.get("SAMETOKEN_SLURM"):
        return "make test-slurm runs these"
    missing = [name for name in ("slurmctld", "slurmd", "srun", "munged") if shutil.which(name) is None]
    if missing:
        return f"missing programs: {', '.join(missing)} (Debian: slurmctld slurmd slurm-client munge)"
    return "" if os.geteuid() == 0 else "daemons of Slurm need root"


def wait_until(true: Callable[[], object], why: Callable[[], str], seconds: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, why()
        time.sleep(0.2)


class Cluster(NamedTuple):
    """A cluster that runs.

    Attributes:
        place: its files. environ: of programs that use it.
        nodes: the process of each node's slurmd.
    """

    place: Path
    environ: dict[str, str]
    nodes: dict[str, subprocess.Popen[bytes]]

    def run(self, *words: str, expected: int | None = 0) -> subprocess.CompletedProcess[str]:
        """A command that ends; its exit code must be as expected unless that is None."""
        done = subprocess.run(words, env=self.environ, capture_output=True, text=True, timeout=240, check=False)
        assert expected is None or done.returncode == expected, f"{done.stdout}\n{done.stderr}"
        return done

    @contextmanager
    def allocation(self, nodes: str) -> Iterator[str]:
        """The number of a job that only holds these nodes."""
        said = self.run("salloc", "--no-shell", f"--nodelist={nodes}").stderr
        job = re.findall(r"job allocation (\d+)", said)[0]
        try:
            yield job
        finally:
            self.run("scancel", job)

    def start(self, node: str) -> None:
        """Starts a node."""
        with (self.place / f"slurmd.{node}.out").open("wb") as log:
            self.nodes[node] = subprocess.Popen(
                ["slurmd", "-D", "-N", node], env=self.environ, stdout=log, stderr=log, start_new_session=True
            )

    def cut_power(self, node: str) -> None:
        """Kills a node with everything that runs on it."""
        for process in [*processes_of(node, self.place), self.nodes[node].pid]:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.nodes[node].wait()


def processes_of(node: str, place: Path) -> list[int]:
    """The processes of jobs on a node: its stepds, and what has its name in the environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (folder / "cmdline").read_bytes()
            environ = (folder / "environ").read_bytes()
            stepd = words.startswith(b"slurmstepd") and f"SLURM_CONF={place}".encode() in environ
            if f"SLURMD_NODENAME={node}\0".encode() in environ or (stepd and f"-N\0{node}".encode() in environ):
                found.append(int(folder.name))
    return found


@contextmanager
def cluster(place: Path) -> Iterator[Cluster]:
    """A cluster that takes jobs, and that leaves nothing behind."""
    first = _ports(len(NODES) + 1)
    (place / "state").mkdir()
    for node in NODES:
        (place / f"spool.{node}").mkdir()
    configuration = CONFIGURATION.format(
        host=socket.gethostname().split(".")[0], place=place, first=first, second=first + 1, last=first + len(NODES)
    )
    (place / "slurm.conf").write_text(configuration)
    (place / "munge.key").write_bytes(os.urandom(SECRET_BYTES))
    (place / "munge.key").chmod(0o400)
    place.chmod(0o755)
    environ = {**os.environ, "SLURM_CONF": str(place / "slurm.conf"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid", "log-file": "munge.log"}
    munged = ["munged", "--foreground", "--force", f"--seed-file={place}/munge.seed"]
    munged += [f"--{option}={place}/{name}" for option, name in files.items()]
    with (place / "daemons.out").open("wb") as out:
        daemons = [subprocess.Popen(munged, stdout=out, stderr=out, env=environ)]
        found = Cluster(place, environ, {})
        try:
            wait_until((place / "munge.socket").exists, lambda: (place / "daemons.out").read_text())
            daemons.append(subprocess.Popen(["slurmctld", "-D"], stdout=out, stderr=out, env=environ))
            for node in NODES:
                found.start(node)
            idle = ("sinfo", "--noheader", "--states=idle", "--format=%D")
            wait_until(
                lambda: found.run(*idle, expected=None).stdout.strip() == str(len(NODES)),
                lambda: (place / "slurmctld.log").read_text()[-3000:],
            )
            yield found
        finally:
            found.run("scancel", "--user=root", expected=None)
            for process in [*found.nodes.values(), *reversed(daemons)]:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(10)
                process.kill()
                process.wait()
            for node in NODES:
                for number in processes_of(node, place):
                    with suppress(ProcessLookupError):
                        os.kill(number, signal.SIGKILL)


def _ports(count: int) -> int:
    """The first of so many ports side by side that nobody uses."""
    for first in range(17_000, 19_000, count):
        with suppress(OSError):
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
            return first
    raise AssertionError("no free ports")
