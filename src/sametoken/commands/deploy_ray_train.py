"""`sametoken deploy ray train`: a head trained on several nodes of a Ray cluster, by torchrun."""

from __future__ import annotations

from sametoken.commands import ray
from sametoken.commands.elsewhere import TRAIN, train_words
from sametoken.commands.options import Chosen

OPTIONS = (*ray.OPTIONS, *TRAIN)
EXAMPLES = {
    "train on 2 nodes": "sametoken deploy ray train MODEL --data prepared --output-dir head --workers 2",
    "train on 2 nodes of 8 GPUs":
        "sametoken deploy ray train MODEL --data prepared --output-dir head --workers 2 --gpus-per-worker 8",
}  # fmt: skip


def command(model: str | None, values: Chosen) -> int:
    """Train a head on several nodes of a Ray cluster: each worker is a node, with a process for each GPU.

    Takes the options of `sametoken train`. Where a node dies, training goes on from its last checkpoint.
    """
    from sametoken.deploy.ray import train

    return train(ray.workers_of(values), train_words(model, values)[0], ray.tell)
