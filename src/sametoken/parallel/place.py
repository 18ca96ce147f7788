"""Which rank this process is: what mpirun, torchrun and srun say in the environment, nothing else."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import NamedTuple

from sametoken.errors import ConfigError

OPTION = "tensor_parallel_size"
HERE = "127.0.0.1"
FIRST_PORT, PORTS = 20000, 10000  # where ranks meet if nobody says a port


class Launcher(NamedTuple):
    """Variables of a launcher: the rank, how many there are, how many on this host, and what names the job."""

    name: str
    rank: str
    size: tuple[str, ...]
    here: tuple[str, ...]
    job: tuple[str, ...] = ()


# The first whose rank is there counts. torchrun first: it may run below srun.
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
)  # fmt: skip


class RankPlace(NamedTuple):
    """One rank among others.

    Attributes:
        rank, size: of the processes.
        here: how many of them are on this host, as far as is known.
        host, port: where rank 0 waits for the others; port 0 takes a free one.
        launcher: who started the processes; "" where rank 0 starts the others.
        shared_store: whether the launcher's own store waits there already.
    """

    rank: int
    size: int
    here: int
    host: str
    port: int
    launcher: str = ""
    shared_store: bool = False


def place_of(environment: Mapping[str, str], count: int) -> RankPlace:
    """The place of this process, of which `count` were asked for.

    Raises:
        ConfigError: a launcher started another number of processes, or says too little.
    """
    for launcher in LAUNCHERS:
        if launcher.rank not in environment:
            continue
        started = _first(environment, launcher.size)
        if launcher.name == "srun" and started == 1:  # a shell of SLURM's, not one of several tasks
            continue
        if started is not None and started != count:
            raise ConfigError(
                f"{launcher.name} started {started} processes, and {OPTION} is {count}; start as many as that, or set "
                f"--tp_size {started}"
            )
        rank = _number(environment, launcher.rank)
        here = _first(environment, launcher.here) or (count if "MASTER_ADDR" not in environment else 1)
        return RankPlace(
            rank, count, here, _host(environment, launcher, here, count), _port(environment, launcher), launcher.name,
            environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )  # fmt: skip
    return RankPlace(0, count, count, HERE, 0)


def _host(environment: Mapping[str, str], launcher: Launcher, here: int, count: int) -> str:
    if stated := environment.get("MASTER_ADDR"):
        return stated
    if here == count:
        return HERE
    if stated := environment.get("SLURM_LAUNCH_NODE_IPADDR"):  # that of rank 0 where srun was started in the job
        return stated
    raise ConfigError(
        f"{launcher.name} started ranks on several hosts, and MASTER_ADDR is not set; set it to the address of rank 0's"
        " host for all of them, with mpirun by -x MASTER_ADDR=ADDRESS"
    )


def _port(environment: Mapping[str, str], launcher: Launcher) -> int:
    """The port that is stated, or one that follows from the job's name, so that two jobs of a host do not meet."""
    if environment.get("MASTER_PORT"):
        return _number(environment, "MASTER_PORT")
    job = " ".join(environment.get(name, "") for name in launcher.job)
    return FIRST_PORT + zlib.crc32(job.encode()) % PORTS


def _first(environment: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    return next((_number(environment, name) for name in names if name in environment), None)


def _number(environment: Mapping[str, str], name: str) -> int:
    """The number that a variable states; of SLURM's lists, such as "2(x3)" and "2,1", the first."""
    try:
        return int(environment[name].partition(",")[0].partition("(")[0])
    except ValueError as error:
        raise ConfigError(f"{name}={environment[name]!r} in the environment: expected a number") from error
