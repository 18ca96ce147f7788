"""`sametoken deploy slurm synthesize`, `prepare` and `train`: jobs on the nodes of a Slurm cluster."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from sametoken.commands import deploy_shards
from sametoken.commands.deploy_shards import Port, numbers_of, work_of
from sametoken.commands.elsewhere import PREPARE, PROGRAM, TRAIN, everywhere, prepare_words, train_words
from sametoken.commands.options import Argument, Chosen, Option, Values, given_words, titled
from sametoken.commands.planning import shell_words
from sametoken.commands.terminal import tell
from sametoken.errors import ConfigError
from sametoken.options.declaration import Count

if TYPE_CHECKING:
    from sametoken.deploy.slurm import Allocation

NODE_OPTIONS = titled(
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

# A number of nodes below a million, or names of nodes, with ranges in brackets.
NODES = r"[1-9][0-9]{0,5}|[A-Za-z][\w.-]*(\[[0-9,-]+\][\w.-]*)?(,[A-Za-z][\w.-]*(\[[0-9,-]+\][\w.-]*)?)*"
PROCESSES = titled(
    "Processes",
    Option("gpus_per_node", Count, 0, "number of GPUs of a node, each with a process; 0: one process on the CPU."),
    Option("port", Port, 29400, "port of the first node where the processes meet."),
)
DOCUMENTED = ("job", "engine", "model", "data", "output", "scripts", "start", "shards", "nodes")
ARGUMENT = Argument(
    list[str],
    "The target; or JOB_ID ENGINE MODEL DATA OUTPUT SCRIPTS START JOBS_PER_NODE NODES [SYSTEM_PROMPT].",
    "MODEL",
    optional=True,
)


def synthesize(words: list[str] | None, values: Chosen) -> int:
    """Answer shards of conversations on many nodes: each starts a server and answers a range of shards.

    The first node takes the shards from --start on, the next one those after them. Runs in an existing
    allocation and waits until the shards are done; without an allocation it submits a job. The same command continues
    with the missing shards.
    """
    model, values = _read(words or [], values)
    where = allocation_of(values)
    work = work_of(model, values)
    first, shards = values["start"], values["shards"]
    numbers_of(values)
    given = Chosen(values | {"data": str(work.data), "output": str(work.output)}, values.given)
    passed = given_words(deploy_shards.OPTIONS, given, ("start",))
    call = [node_python(values), "-m", PROGRAM, "deploy", "shards", everywhere(model), *passed]
    script = where.script("synthesize", call, work.output, start=first, shards=shards)
    return start(values, where, script, work.output / "logs" / f"synthesize-{first:05d}.sh")


def prepare(model: str | None, values: Chosen) -> int:
    """Write samples and the target's hidden states on several nodes; each writes its share of the files.

    The directories must be on a file system that all nodes share. The same command continues with the missing files.
    """
    where = allocation_of(values)
    words, output = prepare_words(model, values)
    script = where.script("prepare", [node_python(values), "-m", *words], output)
    return start(values, where, script, output / "logs" / "prepare.sh")


def train(model: str | None, values: Chosen) -> int:
    """Train a head on several nodes: torchrun starts a process for each GPU, and they share every batch.

    Takes the options of `sametoken train`. A job that Slurm starts again goes on from its last checkpoint.
    """
    where = allocation_of(values)
    words, output = train_words(model, values)
    processes = {"gpus": values["gpus_per_node"], "port": values["port"]}
    script = where.script("train", words, output, python=node_python(values), **processes)
    return start(values, where, script, output / "logs" / "train.sh")


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
    return Allocation(nodes, job, shell_words(values, "sbatch_args"), shell_words(values, "srun_args"), values["wait"])


def start(values: Values, where: Allocation, script: str, file: Path) -> int:
    """Run a script or print it; return the exit code."""
    from sametoken.deploy.slurm import run

    if values["dry_run"]:
        print(script, end="")
        return 0
    return run(where, script, file, tell)


def node_python(values: Values) -> str:
    """Python interpreter of the nodes."""
    return values["node_python"] or sys.executable


def _read(words: list[str], values: Chosen) -> tuple[str | None, Chosen]:
    """Model, and options, including those that are given by position in the order of `DOCUMENTED`."""
    if len(words) < 2:
        return (words[0] if words else None), values
    if len(words) not in (len(DOCUMENTED), len(DOCUMENTED) + 1):
        raise ConfigError(
            f"got {len(words)} words, expected MODEL alone, or 9 or 10: JOB_ID ENGINE MODEL DATA OUTPUT SCRIPTS START "
            "JOBS_PER_NODE NODES [SYSTEM_PROMPT]"
        )
    found = dict(zip(DOCUMENTED, words, strict=False))
    model, _ = found.pop("model"), found.pop("scripts")
    if len(words) > len(DOCUMENTED):
        found["system_prompt"] = words[-1].removeprefix('"').removesuffix('"')  # quotes for its launch.sh
    for name in ("start", "shards"):
        if not re.fullmatch("[0-9]{1,6}", found[name]) or int(found[name]) < (name != "start"):
            least = int(name != "start")
            raise ConfigError(f"{name} is {found[name]!r}, expected a number from {least} to 999999")
    if twice := sorted(found.keys() & values.given):
        raise ConfigError(f"--{twice[0].replace('_', '-')} is given twice; leave the option out")
    numbers = {name: int(found[name]) for name in ("start", "shards")}
    print("SCRIPTS is not needed: the nodes run commands of sametoken", file=sys.stderr)
    return model, Chosen(values | found | numbers, values.given | found.keys())


ANSWER = "sametoken deploy slurm synthesize MODEL --data shards --output answers"
WRITE = "sametoken deploy slurm prepare MODEL --data answers.jsonl --output prepared"
LEARN = "sametoken deploy slurm train MODEL --data prepared --output-dir head"
ALLOCATED = "sametoken deploy slurm synthesize 12 vllm MODEL shards answers - 40 10 n1,n2,n3,n4"
JOBS = {
    "synthesize": SimpleNamespace(
        command=synthesize,
        ARGUMENT=ARGUMENT,
        OPTIONS=(*NODE_OPTIONS, *deploy_shards.OPTIONS),
        EXAMPLES={
            "submit a job of 4 nodes": f"{ANSWER} --nodes 4",
            "answer the shards 40 to 79 in an existing allocation": ALLOCATED,
            "look at the script": f"{ANSWER} --nodes n[1-4] --dry-run",
        },
    ),
    "prepare": SimpleNamespace(
        command=prepare,
        OPTIONS=(*NODE_OPTIONS, *PREPARE),
        EXAMPLES={
            "write hidden states on 4 nodes": f"{WRITE} --nodes 4",
            "look at the script": f"{WRITE} --nodes 4 --dry-run",
        },
    ),
    "train": SimpleNamespace(
        command=train,
        OPTIONS=(*NODE_OPTIONS, *PROCESSES, *TRAIN),
        EXAMPLES={
            "train on 2 nodes of 8 GPUs": f"{LEARN} --nodes 2 --gpus-per-node 8",
            "look at the script": f"{LEARN} --nodes 2 --dry-run",
        },
    ),
}
