"""Slurm jobs: their scripts, submission of a new job, and execution in an existing allocation."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sametoken.deploy.shards import LOGS
from sametoken.deploy.start import noted_signals
from sametoken.deploy.templates import render
from sametoken.errors import ConfigError
from sametoken.files import make_directory

JOB = "SLURM_JOB_ID"
ANSWERS_S = 60.0  # time limit of a reply of Slurm's controller, in seconds


class Allocation(NamedTuple):
    """Nodes on which a job runs.

    Attributes:
        nodes: names of the nodes as Slurm writes them, for example n[1-4]; or their number, for a new job.
        job: number of the job whose allocation is used; None for a new job.
        sbatch: further arguments of sbatch.
        srun: further arguments of srun.
        wait: wait until a new job ends.
    """

    nodes: str | None
    job: str | None
    sbatch: tuple[str, ...] = ()
    srun: tuple[str, ...] = ()
    wait: bool = False

    @property
    def named(self) -> bool:
        """True if the names of the nodes are stated."""
        return self.nodes is not None and not self.nodes.isdigit()

    def script(self, job: str, command: Sequence[str], output: Path, **values: Any) -> str:
        """Script of a job.

        Args:
            job: "synthesize", "prepare" or "train".
            command: command of each node.
            output: directory; logs are written to its folder `LOGS`.
            values: further values of the job's template.

        Raises:
            ConfigError: the path of the logs has a character that is special for Slurm.
        """
        logs = str(output / LOGS)
        if odd := sorted({each for each in logs if each in "\"'\\%" or not each.isprintable()}):
            found = " ".join(map(repr, odd))
            raise ConfigError(f"{logs!r}: {found} is special for Slurm in a path; use another folder")
        own = {
            "name": job, "logs": logs, "command": tuple(command), "named": self.named, "sbatch": self.sbatch,
            "nodes": self.nodes or 1, "where": shlex.quote(str(self.nodes)) if self.named else '"$SLURM_JOB_NODELIST"',
            "srun": (*[f"--jobid={self.job}"] * bool(self.job), "--overlap", *self.srun), "gpus": 0,
        }  # fmt: skip
        return render(f"slurm_{job}.sh", own | values)


def run(where: Allocation, script: str, file: Path, tell: Callable[[str], object]) -> int:
    """Write a script to `file`, and run it in the allocation or submit it.

    Returns:
        Exit code of the script if the job is waited for, else 0.

    Raises:
        ConfigError: Slurm is not installed or does not respond, the job does not run, or sbatch refuses the script.
    """
    _check(where)
    make_directory(file.parent)
    file.write_text(script)
    if where.job is None:
        return _submit(where, file, tell)
    process = subprocess.Popen(["bash", str(file)], env={**os.environ, JOB: where.job}, start_new_session=True)
    with noted_signals(process.terminate):
        return process.wait()


def _submit(where: Allocation, file: Path, tell: Callable[[str], object]) -> int:
    words = ["sbatch", "--parsable", *["--wait"] * where.wait, str(file)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        number = process.stdout.readline().strip().partition(";")[0]
        if number:
            tell(f"job {number} is submitted: {file}; its logs are in {file.parent}")
        code = process.wait()
    if not number:
        raise ConfigError(f"sbatch ended with exit code {code}; see its message above and {file}")
    return code


def _check(where: Allocation) -> None:
    """Raise ConfigError unless Slurm's controller responds and a stated job runs."""
    for program in ("sbatch", "srun", "scontrol", "squeue"):
        if shutil.which(program) is None:
            raise ConfigError(
                f"there is no {program} here; run this on a machine of a Slurm cluster, or add --dry-run to print the "
                "script"
            )
    ping = _asked(["scontrol", "ping"])
    if ping.returncode or " UP" not in ping.stdout:
        said = (ping.stdout + ping.stderr).strip() or "no answer"
        raise ConfigError(f"Slurm's controller does not answer: {said}; start slurmctld, or set SLURM_CONF")
    if where.job is not None:
        state = _asked(["squeue", "--noheader", "--jobs", where.job, "--format", "%T"])
        if (found := state.stdout.strip()) != "RUNNING":
            raise ConfigError(
                f"job {where.job} does not run ({found or state.stderr.strip() or 'it is not listed'}); make an "
                f"allocation with salloc, or unset {JOB} and leave --job out so that a new job is submitted"
            )


def _asked(words: Iterable[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(list(words), capture_output=True, text=True, timeout=ANSWERS_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{shlex.join(words)} did not answer within {ANSWERS_S:g} s; is slurmctld up?") from error
