"""Rank of this process, from the variables that mpirun, torchrun and srun set."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from typing import NamedTuple

from sametoken.errors import ConfigError

OPTION = "tensor_parallel_size"
HERE = "127.0.0.1"
FIRST_PORT, PORTS = 20000, 10000  # default port of the rendezvous


class Launcher(NamedTuple):
    """Variables of a launcher: rank, number of ranks, number of ranks on this host, and name of the job."""

    name: str
    rank: str
    size: tuple[str, ...]
    here: tuple[str, ...]
    job: tuple[str, ...] = ()


# The first whose rank variable is set applies. torchrun first: it may run below srun. MPICH and Intel MPI set PMI_RANK.
LAUNCHERS = (
    Launcher("torchrun", "RANK", ("WORLD_SIZE",), ("LOCAL_WORLD_SIZE",)),
    Launcher(
        "mpirun", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",), ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    Launcher(
        "srun", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ("SLURM_STEP_TASKS_PER_NODE",),
        ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ),
    Launcher("mpirun", "PMIX_RANK", ("PMIX_SIZE", "PMI_SIZE"), (), ("PMIX_NAMESPACE",)),
    Launcher("mpirun", "PMI_RANK", ("PMI_SIZE",), ("MPI_LOCALNRANKS",)),
)  # fmt: skip
MPIRUN_URI = "OMPI_MCA_orte_hnp_uri"  # Open MPI 4: addresses of the host of mpirun


class RankPlace(NamedTuple):
    """Place of a rank.

    Attributes:
        rank: number of the rank.
        size: number of ranks.
        here: number of ranks on this host, as far as known.
        host, port: address at which rank 0 listens; port 0 for a free one.
        launcher: name of the launcher, "" if rank 0 starts the others.
        shared_store: true if the launcher's own store listens at this address.
        attempt: number of restarts by the launcher.
        others: further addresses of rank 0's host, some of which may be unreachable.
    """

    rank: int
    size: int
    here: int
    host: str
    port: int
    launcher: str = ""
    shared_store: bool = False
    attempt: int = 0
    others: tuple[str, ...] = ()

    @property
    def share(self) -> float:
        """Share of a target in all ranks of this host together."""
        return self.here / self.size

    @property
    def own_terminal(self) -> bool:
        """True if the rank has another terminal than rank 0: torchrun is started on each host separately."""
        return self.launcher == "torchrun" and self.here < self.size

    def bound(self, environment: Mapping[str, str], cores: int) -> str:
        """Warning about mpirun's binding for a rank that may use `cores` cores, "" if the binding costs nothing."""
        if "OMPI_MCA_orte_bound_at_launch" not in environment or not 0 < cores * self.here < (os.cpu_count() or 1):
            return ""
        return (
            f"mpirun lets this rank compute on {cores} of {os.cpu_count()} cores; give mpirun --bind-to none, or "
            "--map-by slot:PE=CORES, for all of them"
        )


def started(environment: Mapping[str, str]) -> int:
    """Number of processes that torchrun, accelerate or mpirun started together, this one included; 1 without them."""
    found = [_first(environment, each.size) for each in LAUNCHERS if each.name != "srun" and each.rank in environment]
    return (found[0] or 1) if found else 1


def place_of(environment: Mapping[str, str], count: int) -> RankPlace:
    """Place of this process among `count` requested ones.

    Raises:
        ConfigError: a launcher started another number of processes, or set too few variables.
    """
    for launcher in LAUNCHERS:
        if launcher.rank not in environment:
            continue
        started = _first(environment, launcher.size)
        if launcher.name == "srun" and started == 1:  # a shell of SLURM, not one of several tasks
            continue
        if started is not None and started != count:
            raise ConfigError(
                f"{launcher.name} started {started} processes, and {OPTION} is {count}; start as many as that, or set "
                f"--tp_size {started}"
            )
        rank = _number(environment, launcher.rank)
        here = _first(environment, launcher.here) or (count if "MASTER_ADDR" not in environment else 1)
        host, *others = _hosts(environment, launcher, rank, here, count)
        return RankPlace(
            rank, count, here, host, _port(environment, launcher), launcher.name,
            environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            _first(environment, ("TORCHELASTIC_RESTART_COUNT",)) or 0, tuple(others),
        )  # fmt: skip
    return RankPlace(0, count, count, HERE, 0)


def _hosts(environment: Mapping[str, str], launcher: Launcher, rank: int, here: int, count: int) -> list[str]:
    """Addresses of rank 0's host, at least one."""
    if stated := environment.get("MASTER_ADDR"):
        return [stated]
    if here == count:
        return [HERE]
    if stated := environment.get("SLURM_LAUNCH_NODE_IPADDR"):  # address of rank 0 if srun was started in the job
        return [stated]
    found = re.search(r"tcp://([^:;]+):", environment.get(MPIRUN_URI, ""))
    if found and (rank or environment.get("OMPI_MCA_orte_local_daemon_uri") == environment[MPIRUN_URI]):
        return found[1].split(",")
    if found:
        raise ConfigError(
            "rank 0 is not on the host where mpirun runs, so the others do not know its address; run mpirun on the "
            "first host of the hostfile, or set -x MASTER_ADDR=ADDRESS to the address of rank 0's host"
        )
    raise ConfigError(
        f"{launcher.name} started ranks on several hosts, and MASTER_ADDR is not set; set it to the address of rank 0's"
        " host for all of them, with mpirun by -x MASTER_ADDR=ADDRESS"
    )


def _port(environment: Mapping[str, str], launcher: Launcher) -> int:
    """Port of the environment, or one derived from the job's name, so that two jobs of a host use different ports."""
    if environment.get("MASTER_PORT"):
        return _number(environment, "MASTER_PORT")
    job = " ".join(environment.get(name, "") for name in launcher.job)
    return FIRST_PORT + zlib.crc32(job.encode()) % PORTS


def _first(environment: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    return next((_number(environment, name) for name in names if name in environment), None)


def _number(environment: Mapping[str, str], name: str) -> int:
    """Number in a variable; for lists of SLURM, for example "2(x3)" and "2,1", the first."""
    try:
        return int(environment[name].partition(",")[0].partition("(")[0])
    except ValueError as error:
        raise ConfigError(f"{name}={environment[name]!r} in the environment: expected a number") from error
