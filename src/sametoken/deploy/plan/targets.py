"""A launch as a file, by the targets that users name; each has a template in `deploy/templates`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from sametoken.deploy.plan.launch import Launch
from sametoken.deploy.templates import render
from sametoken.errors import ConfigError

FOLDER = "/etc/sametoken"  # where files of a launch are in a container
HUB_CACHE = "/cache/huggingface"  # which every engine finds by HF_HOME
# The template of each target, and the folder of the launch's files for a server that other hosts reach.
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
    """The file of a target.

    Raises:
        ConfigError: the nodes cannot share the ranks equally.
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
    """Notes on services that must run, and on options that a worker lacks because the frontend is the server, a
    sentence each.
    """
    kept = ("--host", "--port", "--served_model_name")
    lost = [word for word in launch.server if word.startswith("--") and word not in kept]
    found = [f"{', '.join(lost)}: left out, since Dynamo's frontend is the server"] if lost else []
    found = [INFRASTRUCTURE, *found]
    return found + ["Dynamo's frontend asks for no API key; put a proxy before it"] * bool(launch.secrets)
