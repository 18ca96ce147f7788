"""`sametoken deploy slurm train`: a head trained on several nodes of Slurm, by torchrun."""

from __future__ import annotations

from sametoken.commands import slurm
from sametoken.commands.deploy_shards import Port
from sametoken.commands.elsewhere import TRAIN, train_words
from sametoken.commands.options import Chosen, Option, titled
from sametoken.commands.slurm import allocation_of, node_python, start
from sametoken.options.declaration import Count

PROCESSES = titled(
    "Processes",
    Option("gpus_per_node", Count, 0, "number of GPUs of a node, each with a process; 0: one process on the CPU."),
    Option("port", Port, 29400, "port of the first node where the processes meet."),
)
OPTIONS = (*slurm.OPTIONS, *PROCESSES, *TRAIN)
EXAMPLES = {
    "train on 2 nodes of 8 GPUs":
        "sametoken deploy slurm train MODEL --data prepared --output-dir head --nodes 2 --gpus-per-node 8",
    "look at the script": "sametoken deploy slurm train MODEL --data prepared --output-dir head --nodes 2 --dry-run",
}  # fmt: skip


def command(model: str | None, values: Chosen) -> int:
    """Train a head on several nodes: torchrun starts a process for each GPU, and they share every batch.

    Takes the options of `sametoken train`. A job that Slurm starts again goes on from its last checkpoint.
    """
    where = allocation_of(values)
    words, output = train_words(model, values)
    processes = {"gpus": values["gpus_per_node"], "port": values["port"]}
    script = where.script("train", words, output, python=node_python(values), **processes)
    return start(values, where, script, output / "logs" / "train.sh")
