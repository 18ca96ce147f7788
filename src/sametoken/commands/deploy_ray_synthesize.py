"""`sametoken deploy ray synthesize`: shards of conversations answered on a Ray cluster."""

from __future__ import annotations

from sametoken.commands import deploy_shards, ray
from sametoken.commands.deploy_shards import numbers_of, work_of
from sametoken.commands.options import Chosen

OPTIONS = (*ray.OPTIONS, *deploy_shards.OPTIONS)
EXAMPLES = {
    "answer 40 shards": "sametoken deploy ray synthesize MODEL --data shards --output answers --shards 40",
    "answer them on 4 workers with a GPU each":
        "sametoken deploy ray synthesize MODEL --data shards --output answers --shards 40 --workers 4 "
        "--gpus-per-worker 1",
}  # fmt: skip


def command(model: str | None, values: Chosen) -> int:
    """Answer shards of conversations on a Ray cluster: workers start a server each, and Ray gives them the shards.

    A worker that dies is started again. The same command goes on with what is missing.
    """
    from sametoken.deploy.ray import synthesize

    return synthesize(ray.workers_of(values), work_of(model, values), numbers_of(values), ray.tell)
