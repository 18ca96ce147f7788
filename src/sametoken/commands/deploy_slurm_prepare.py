"""`sametoken deploy slurm prepare`: the hidden states of a training set, written by several nodes of Slurm."""

from __future__ import annotations

from sametoken.commands import slurm
from sametoken.commands.elsewhere import PREPARE, prepare_words
from sametoken.commands.options import Chosen
from sametoken.commands.slurm import allocation_of, node_python, start

OPTIONS = (*slurm.OPTIONS, *PREPARE)
EXAMPLES = {
    "write hidden states on 4 nodes":
        "sametoken deploy slurm prepare MODEL --data answers.jsonl --output prepared --nodes 4",
    "look at the script":
        "sametoken deploy slurm prepare MODEL --data answers.jsonl --output prepared --nodes 4 --dry-run",
}  # fmt: skip


def command(model: str | None, values: Chosen) -> int:
    """Write samples and the target's hidden states on several nodes; each writes its share of the files.

    The directories must be on a file system that all nodes share. The same command goes on with what is missing.
    """
    where = allocation_of(values)
    words, output = prepare_words(model, values)
    script = where.script("prepare", [node_python(values), "-m", *words], output)
    return start(values, where, script, output / "logs" / "prepare.sh")
