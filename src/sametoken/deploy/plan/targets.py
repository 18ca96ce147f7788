"""Deployment file of a launch, by target; each target has a template in `deploy/templates`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from sametoken.deploy.plan.launch import Launch
from sametoken.deploy.templates import render
from sametoken.errors import ConfigError

FOLDER = "/etc/sametoken"  # folder of the files of a launch in a container
HUB_CACHE = "/cache/huggingface"  # value of HF_HOME in a container
# Template of each target, and the argument of `Launch.inside`; None for a server at the stated address.
FORMS = {
    "shell": ("shell.sh", None),
    "compose": ("compose.yml", FOLDER),
    "kubernetes": ("kubernetes.yml", FOLDER),
    "slurm": ("slurm.sh", "."),
    "dynamo": ("dynamo.sh", None),
}
INFRASTRUCTURE = (
    "etcd (port 2379) and NATS (port 4222) must run first, as `docker compose -f deploy/docker-compose.yml up -d` in "
    "Dynamo's repository starts them. On one host DYN_DISCOVERY_BACKEND=file DYN_REQUEST_PLANE=tcp DYN_EVENT_PLANE=zmq "
    "needs neither"
)


def render_target(target: str, launch: Launch) -> str:
    """Text of the file of a target.

    Raises:
        ConfigError: the number of nodes does not divide the number of ranks.
    """
    template, folder = FORMS[target]
    share, rest = divmod(launch.ranks, launch.nodes)
    if launch.nodes > 1 and (rest or not share):
        raise ConfigError(
            f"--nodes {launch.nodes} cannot share --tp-size {launch.ranks} equally; give a number that divides it"
        )
    values: dict[str, Any] = asdict(launch if folder is None else launch.inside(folder)) | {
        "name": launch.name, "host": launch.host, "share": share, "folders": launch.folders,
        "folder": FOLDER, "cache": HUB_CACHE,
    }  # fmt: skip
    return render(template, values | {"words": values["program"] + values["options"] + values["server"]})


TARGETS: dict[str, Callable[[Launch], str]] = {name: partial(render_target, name) for name in FORMS}


def notes_of(launch: Launch) -> list[str]:
    """Notes for Dynamo, a sentence each: services that must run, and server options that a worker lacks."""
    kept = ("--host", "--port", "--served_model_name")
    lost = [word for word in launch.server if word.startswith("--") and word not in kept]
    found = [f"{', '.join(lost)}: left out, since Dynamo's frontend is the server"] if lost else []
    found = [INFRASTRUCTURE, *found]
    return found + ["Dynamo's frontend requires no API key; put a proxy before it"] * bool(launch.secrets)
