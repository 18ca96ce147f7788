"""`sametoken deploy ray prepare`: the hidden states of a training set, written on a Ray cluster."""

from __future__ import annotations

from sametoken.commands import ray
from sametoken.commands.elsewhere import PREPARE, prepare_words
from sametoken.commands.options import Chosen

OPTIONS = (*ray.OPTIONS, *PREPARE)
EXAMPLES = {
    "write hidden states": "sametoken deploy ray prepare MODEL --data answers.jsonl --output prepared",
    "write them on 4 workers with a GPU each":
        "sametoken deploy ray prepare MODEL --data answers.jsonl --output prepared --workers 4 --gpus-per-worker 1",
}  # fmt: skip


def command(model: str | None, values: Chosen) -> int:
    """Write samples and the target's hidden states on a Ray cluster; each worker writes its share of the files.

    The directories must be on a file system that all nodes share. The same command goes on with what is missing.
    """
    from sametoken.deploy.ray import prepare

    return prepare(ray.workers_of(values), prepare_words(model, values)[0], ray.tell)
