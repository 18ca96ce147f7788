"""`sametoken deploy ray synthesize`, `prepare` and `train`: jobs on the workers of a Ray cluster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from sametoken.commands import deploy_shards
from sametoken.commands.deploy_shards import numbers_of, work_of
from sametoken.commands.elsewhere import PREPARE, TRAIN, prepare_words, train_words
from sametoken.commands.options import Chosen, Option, Values, titled
from sametoken.commands.terminal import tell
from sametoken.options.declaration import Positive

if TYPE_CHECKING:
    from sametoken.deploy.ray import RayWorkers

Share = Annotated[float, Field(ge=0)]
WORKER_OPTIONS = titled(
    "Ray",
    Option("address", str, None, "head node of the cluster; without it: RAY_ADDRESS, or this machine.", "HOST:PORT"),
    Option("workers", Positive, None, "number of workers at a time; without it: one for each node."),
    Option("cpus_per_worker", Share, 1.0, "number of CPUs that a worker takes of those that Ray counts."),
    Option("gpus_per_worker", Share, 0.0, "number of GPUs that a worker takes of those that Ray counts."),
)


def synthesize(model: str | None, values: Chosen) -> int:
    """Answer shards of conversations on a Ray cluster: workers start a server each, and Ray gives them the shards.

    A worker that dies is started again. The same command continues with the missing answers.
    """
    from sametoken.deploy import ray

    return ray.synthesize(workers_of(values), work_of(model, values), numbers_of(values), tell)


def prepare(model: str | None, values: Chosen) -> int:
    """Write samples and the target's hidden states on a Ray cluster; each worker writes its share of the files.

    The directories must be on a file system that all nodes share. The same command continues with the missing files.
    """
    from sametoken.deploy import ray

    return ray.prepare(workers_of(values), prepare_words(model, values)[0], tell)


def train(model: str | None, values: Chosen) -> int:
    """Train a head on several nodes of a Ray cluster: each worker is a node, with a process for each GPU.

    Takes the options of `sametoken train`. Where a node dies, training goes on from its last checkpoint.
    """
    from sametoken.deploy import ray

    return ray.train(workers_of(values), train_words(model, values)[0], tell)


def workers_of(values: Values) -> RayWorkers:
    """Number and resources of the workers of a job, from the command's options."""
    from sametoken.deploy.ray import RayWorkers

    return RayWorkers(values["address"], values["workers"], values["cpus_per_worker"], values["gpus_per_worker"])


ANSWER = "sametoken deploy ray synthesize MODEL --data shards --output answers"
WRITE = "sametoken deploy ray prepare MODEL --data answers.jsonl --output prepared"
LEARN = "sametoken deploy ray train MODEL --data prepared --output-dir head"
JOBS = {
    "synthesize": SimpleNamespace(
        command=synthesize,
        OPTIONS=(*WORKER_OPTIONS, *deploy_shards.OPTIONS),
        EXAMPLES={
            "answer 40 shards": f"{ANSWER} --shards 40",
            "answer them on 4 workers with a GPU each": f"{ANSWER} --shards 40 --workers 4 --gpus-per-worker 1",
        },
    ),
    "prepare": SimpleNamespace(
        command=prepare,
        OPTIONS=(*WORKER_OPTIONS, *PREPARE),
        EXAMPLES={
            "write hidden states": WRITE,
            "write them on 4 workers with a GPU each": f"{WRITE} --workers 4 --gpus-per-worker 1",
        },
    ),
    "train": SimpleNamespace(
        command=train,
        OPTIONS=(*WORKER_OPTIONS, *TRAIN),
        EXAMPLES={
            "train on 2 nodes": f"{LEARN} --workers 2",
            "train on 2 nodes of 8 GPUs": f"{LEARN} --workers 2 --gpus-per-worker 8",
        },
    ),
}
