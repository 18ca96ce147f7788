"""Parts that the commands for Slurm share: the options for the nodes of a job, and its start."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sametoken.commands.options import Option, Values, titled
from sametoken.errors import ConfigError

if TYPE_CHECKING:
    from sametoken.deploy.slurm import Allocation

OPTIONS = titled(
    "Slurm",
    Option(
        "nodes", str, None, "nodes of the job: names as n1,n2 or n[1-4], or how many; without it: those of the job.",
        "NAMES|COUNT",
    ),
    Option(
        "job", str, None,
        "number of a job whose allocation is used; without it: SLURM_JOB_ID, or a new job is submitted.", "ID",
    ),
    Option("wait", bool, False, "wait until a new job ends, and end with its exit code."),
    Option("sbatch_args", str, None, "further words for sbatch, for example '-A account -p partition -t 120'.", "TEXT"),
    Option("srun_args", str, None, "further words for srun, for example '--container-image=IMAGE'.", "TEXT"),
    Option(
        "node_python", str, None, "Python on the nodes with sametoken installed; without it: the one that runs this.",
        "FILE",
    ),
    Option("dry_run", bool, False, "print the script and start nothing."),
)  # fmt: skip

# How many, below a million; or names, with ranges in brackets.
NODES = r"[1-9][0-9]{0,5}|[A-Za-z][\w.-]*(\[[0-9,-]+\][\w.-]*)?(,[A-Za-z][\w.-]*(\[[0-9,-]+\][\w.-]*)?)*"


def allocation_of(values: Values) -> Allocation:
    """Allocation in which the job runs.

    Raises:
        ConfigError: an option is wrong.
    """
    from sametoken.deploy.slurm import JOB, Allocation

    nodes, job = values["nodes"], values["job"] or os.environ.get(JOB) or None
    if nodes is not None and not re.fullmatch(NODES, nodes):
        raise ConfigError(f"--nodes {nodes!r}: expected names such as n1,n2 or n[1-4], or how many")
    if job is not None and not re.fullmatch("[0-9]+", job):
        raise ConfigError(f"--job {job!r}: expected the number of a job, as salloc and squeue print it")
    if job is None and nodes is None:
        raise ConfigError("--nodes is missing; expected names such as n1,n2, or how many")
    if job is not None and nodes is not None and nodes.isdigit():
        raise ConfigError(f"--nodes {nodes}: expected names of nodes of job {job}, or leave it out for all of them")
    if job is not None and nodes is None and "SLURM_JOB_NODELIST" not in os.environ:
        raise ConfigError(f"--nodes is missing; expected names of nodes of job {job}")
    if job is not None and (values["wait"] or values["sbatch_args"]):
        raise ConfigError(f"--wait and --sbatch-args are for a new job, and this is job {job}; leave them out")
    return Allocation(nodes, job, _words(values, "sbatch_args"), _words(values, "srun_args"), values["wait"])


def start(values: Values, where: Allocation, script: str, file: Path) -> int:
    """Run a script or print it; the exit code."""
    from sametoken.deploy.slurm import run

    if values["dry_run"]:
        print(script, end="")
        return 0
    return run(where, script, file, lambda line: print(line, file=sys.stderr, flush=True))


def node_python(values: Values) -> str:
    """The Python of the nodes."""
    return values["node_python"] or sys.executable


def _words(values: Values, name: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(values[name] or ""))
    except ValueError as error:
        option = name.replace("_", "-")
        raise ConfigError(f"--{option} {values[name]!r}: {error}; expected words as a shell has") from error
