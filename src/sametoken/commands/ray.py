"""Parts that the commands for Ray share: the options for the workers of a job."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from sametoken.commands.options import Option, Values, titled
from sametoken.options.declaration import Positive

if TYPE_CHECKING:
    from sametoken.deploy.ray import RayWorkers

Share = Annotated[float, Field(ge=0)]
OPTIONS = titled(
    "Ray",
    Option("address", str, None, "head node of the cluster; without it: RAY_ADDRESS, or this machine.", "HOST:PORT"),
    Option("workers", Positive, None, "number of workers at a time; without it: one for each node."),
    Option("cpus_per_worker", Share, 1.0, "number of CPUs that a worker takes of those that Ray counts."),
    Option("gpus_per_worker", Share, 0.0, "number of GPUs that a worker takes of those that Ray counts."),
)


def workers_of(values: Values) -> RayWorkers:
    """Workers that a job asks for."""
    from sametoken.deploy.ray import RayWorkers

    return RayWorkers(values["address"], values["workers"], values["cpus_per_worker"], values["gpus_per_worker"])


def tell(line: str) -> None:
    """Show how a job goes."""
    print(line, file=sys.stderr, flush=True)
