"""Jobs of Slurm: their scripts, and how they are submitted, or run in an existing allocation."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from sametoken.deploy.shards import LOGS
from sametoken.deploy.start import torchrun
from sametoken.errors import ConfigError
from sametoken.files import make_directory

JOB = "SLURM_JOB_ID"
ANSWERS_S = 60.0  # that Slurm's controller may take
# The exit code of a process in the background, also where this shell traps a signal meanwhile.
WAIT_FUNCTION = """ended() {
    local code
    while :; do
        wait "$1" && code=0 || code=$?
        kill -0 "$1" 2>/dev/null || return "$code"
    done
}
"""
SYNTHESIZE = """{header}{ended}logs={logs} first={start} steps=() code=0
trap 'kill -TERM "${{steps[@]}}" 2>/dev/null' TERM INT
for node in $(scontrol show hostnames {nodes}); do
    srun {srun} --nodes=1 --ntasks=1 --nodelist="$node" \\
        --open-mode=append --output="$logs/$node.log" \\
        {command} --start "$first" &
    steps+=($!)
    echo "$node: shards $first to $((first + {shards} - 1)), log $logs/$node.log"
    first=$((first + {shards}))
done
for step in "${{steps[@]}}"; do
    ended "$step" && status=0 || status=$?
    ((status == 0)) || echo "srun with process number $step ended with exit code $status" >&2
    ((status <= code)) || code=$status
done
exit "$code"
"""
EVERYWHERE = """{header}{ended}logs={logs}
nodes=($(scontrol show hostnames {nodes}))
{before}srun {srun} --nodes="${{#nodes[@]}}" --ntasks="${{#nodes[@]}}" --ntasks-per-node=1 --kill-on-bad-exit=1 \\
    --nodelist="$(IFS=,; echo "${{nodes[*]}}")" --open-mode=append --output="$logs/%N-%t.log" \\
    {command} &
step=$!
trap 'kill -TERM "$step" 2>/dev/null' TERM INT
echo "${{nodes[*]}}: logs in $logs"
ended "$step"
"""
# Nodes meet at the first; a node's address may be another word than its name.
FIRST_ADDRESS = """first=$(scontrol show node "${nodes[0]}" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')
"""


class Allocation(NamedTuple):
    """Nodes on which a job runs.

    Attributes:
        nodes: their names as Slurm writes them, n[1-4] for example; or how many, for a new job.
        job: number of the job whose allocation is used, None for a new job.
        sbatch, srun: further words for both.
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

    def directives(self, name: str, logs: Path, *more: str) -> str:
        """The first lines of a script, which sbatch reads; the nodes among them.

        Raises:
            ConfigError: Slurm does not take the path of the logs literally.
        """
        nodes = f"--nodelist={self.nodes}" if self.named else f"--nodes={self.nodes or 1}"
        if odd := sorted({each for each in str(logs) if each in "\"'\\%" or not each.isprintable()}):
            found = " ".join(map(repr, odd))
            raise ConfigError(f"{str(logs)!r}: Slurm gives {found} in a path another meaning; use another folder")
        output = f'--output="{logs}/%x-%j.log"'
        return header(f"--job-name={name}", nodes, "--ntasks-per-node=1", output, *more, shlex.join(self.sbatch))

    @property
    def shell(self) -> dict[str, str]:
        """Values of the placeholders that all scripts have."""
        nodes = shlex.quote(str(self.nodes)) if self.named else '"$SLURM_JOB_NODELIST"'
        srun = shlex.join([f"--jobid={self.job}"] * bool(self.job) + ["--overlap", *self.srun])
        return {"nodes": nodes, "srun": srun, "ended": WAIT_FUNCTION}


def header(*directives: str) -> str:
    """The first lines of a batch script."""
    return "".join(["#!/bin/bash\n", *(f"#SBATCH {each}\n" for each in directives if each)])


def synthesize_script(where: Allocation, command: Sequence[str], start: int, shards: int, output: Path) -> str:
    """A step for each node: `command` with its own first shard."""
    logs = output / LOGS
    stated = where.directives("synthesize", logs, "--no-kill", "--requeue")  # nodes do not need each other
    return SYNTHESIZE.format(
        header=stated, start=start, shards=shards, logs=shlex.quote(str(logs)), command=shlex.join(command),
        **where.shell,
    )  # fmt: skip


def prepare_script(where: Allocation, command: Sequence[str], output: Path) -> str:
    """One step on all nodes: `command` with the part of its node."""
    part = 'exec "$@" --shard "$SLURM_PROCID/$SLURM_NTASKS"'
    words = shlex.join(["bash", "-c", part, "prepare", *command])
    return _everywhere(where, "prepare", words, output, "--requeue")


def train_script(where: Allocation, python: str, words: Sequence[str], gpus: int, port: int, output: Path) -> str:
    """One step on all nodes: torchrun, which starts `python -m WORDS` for each GPU."""
    launch = shlex.join([python, "-m", *torchrun("NODES", gpus or 1, "ADDRESS", str(port)), "-m", *words])
    for name, value in (("NODES", '"${#nodes[@]}"'), ("ADDRESS", '"$first"')):
        launch = launch.replace(f"={name}", f"={value}", 1)
    # torchrun reads options from variables of this form too.
    command = f"bash -c 'PET_NODE_RANK=$SLURM_PROCID exec \"$@\"' train {launch}"
    stated = ["--requeue"] + [f"--gpus-per-node={gpus}"] * bool(gpus)
    return _everywhere(where, "train", command, output, *stated, before=FIRST_ADDRESS)


def _everywhere(where: Allocation, name: str, command: str, output: Path, *directives: str, before: str = "") -> str:
    logs = output / LOGS
    stated = where.directives(name, logs, *directives)
    return EVERYWHERE.format(
        header=stated, before=before, command=command, logs=shlex.quote(str(logs)), **where.shell
    )  # fmt: skip


def run(where: Allocation, script: str, file: Path, tell: Callable[[str], object]) -> int:
    """Write a script, and run it in the allocation or submit it.

    Returns:
        The script's exit code where this waits for it, else 0.

    Raises:
        ConfigError: Slurm is not there or does not answer, there is no such job, or it refuses the script.
    """
    _check(where)
    make_directory(file.parent)
    file.write_text(script)
    if where.job is None:
        return _submit(where, file, tell)
    process = subprocess.Popen(["bash", str(file)], env={**os.environ, JOB: where.job}, start_new_session=True)

    def end(number: int, frame: FrameType | None) -> None:
        process.terminate()

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _submit(where: Allocation, file: Path, tell: Callable[[str], object]) -> int:
    words = ["sbatch", "--parsable", *["--wait"] * where.wait, str(file)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        number = process.stdout.readline().strip().partition(";")[0]
        if number:
            tell(f"job {number} is submitted: {file}; its logs are in {file.parent}")
        code = process.wait()
    if not number:
        raise ConfigError(f"sbatch ended with exit code {code}, and its words above say why; see {file}")
    return code


def _check(where: Allocation) -> None:
    """Refuse to go on without a controller that answers, and the job where one is named."""
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
