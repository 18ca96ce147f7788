"""`sametoken deploy slurm synthesize`: shards of conversations answered on the nodes of a Slurm cluster."""

from __future__ import annotations

import re
import sys

from sametoken.commands import slurm
from sametoken.commands.deploy_shards import OPTIONS as SHARDS
from sametoken.commands.deploy_shards import numbers_of, work_of
from sametoken.commands.elsewhere import PROGRAM, everywhere
from sametoken.commands.options import Argument, Chosen, given_words
from sametoken.commands.slurm import allocation_of, node_python, start
from sametoken.errors import ConfigError

OPTIONS = (*slurm.OPTIONS, *SHARDS)
DOCUMENTED = ("job", "engine", "model", "data", "output", "scripts", "start", "shards", "nodes")
ARGUMENT = Argument(
    list[str],
    "The target; or JOB_ID ENGINE MODEL DATA OUTPUT SCRIPTS START JOBS_PER_NODE NODES [SYSTEM_PROMPT].",
    "MODEL",
    optional=True,
)
EXAMPLES = {
    "submit a job of 4 nodes": "sametoken deploy slurm synthesize MODEL --data shards --output answers --nodes 4",
    "answer the shards 40 to 79 in an existing allocation":
        "sametoken deploy slurm synthesize 12 vllm MODEL shards answers - 40 10 n1,n2,n3,n4",
    "look at the script":
        "sametoken deploy slurm synthesize MODEL --data shards --output answers --nodes n[1-4] --dry-run",
}  # fmt: skip


def command(words: list[str] | None, values: Chosen) -> int:
    """Answer shards of conversations on many nodes: each starts a server and answers a range of shards.

    The first node takes the shards from --start on, the next one those after them. Runs in an existing
    allocation and waits until the shards are done; without an allocation it submits a job. The same command goes on
    with what is missing.
    """
    model, values = _read(words or [], values)
    where = allocation_of(values)
    work = work_of(model, values)
    first, shards = values["start"], values["shards"]
    numbers_of(values)
    given = Chosen(values | {"data": str(work.data), "output": str(work.output)}, values.given)
    passed = given_words(SHARDS, given, ("start",))
    call = [node_python(values), "-m", PROGRAM, "deploy", "shards", everywhere(model), *passed]
    script = where.script("synthesize", call, work.output, start=first, shards=shards)
    return start(values, where, script, work.output / "logs" / f"synthesize-{first:05d}.sh")


def _read(words: list[str], values: Chosen) -> tuple[str | None, Chosen]:
    """The model, and the options with those that stand without names among them."""
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
        found["system_prompt"] = words[-1].removeprefix('"').removesuffix('"')  # its launch.sh needs them
    for name in ("start", "shards"):
        if not re.fullmatch("[0-9]{1,6}", found[name]) or int(found[name]) < (name != "start"):
            least = int(name != "start")
            raise ConfigError(f"{name} is {found[name]!r}, expected a number from {least} to 999999")
    if twice := sorted(found.keys() & values.given):
        raise ConfigError(f"--{twice[0].replace('_', '-')} is given twice; leave the option out")
    numbers = {name: int(found[name]) for name in ("start", "shards")}
    print("SCRIPTS is not needed: the nodes run commands of sametoken", file=sys.stderr)
    return model, Chosen(values | found | numbers, values.given | found.keys())
