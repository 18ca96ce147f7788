"""A launch as a script with NVIDIA Dynamo: its frontend, and the engine as a worker behind it."""

from __future__ import annotations

from sametoken.deploy.plan.launch import Launch
from sametoken.deploy.plan.text import command, here_documents

INFRASTRUCTURE = (
    "etcd (port 2379) and NATS (port 4222) must run first, as `docker compose -f deploy/docker-compose.yml up -d` in "
    "Dynamo's repository starts them. On one host DYN_DISCOVERY_BACKEND=file DYN_REQUEST_PLANE=tcp DYN_EVENT_PLANE=zmq "
    "needs neither"
)
SCRIPT = """#!/bin/bash
# etcd (port 2379) and NATS (port 4222) must run; ETCD_ENDPOINTS and NATS_SERVER say where, if not on this host.
set -e
trap 'echo Cleaning up...; kill 0' EXIT
{files}python -m dynamo.frontend --http-host={host} --http-port={port} &
DYN_SYSTEM_PORT=8081 {worker} &
wait -n
"""


def notes_of(launch: Launch) -> list[str]:
    """Notes on services that must run, and on options that a worker lacks because the frontend is the server, a
    sentence each.
    """
    kept = ("--host", "--port", "--served_model_name")
    lost = [word for word in launch.server if word.startswith("--") and word not in kept]
    found = [f"{', '.join(lost)}: left out, since Dynamo's frontend is the server"] if lost else []
    found = [INFRASTRUCTURE, *found]
    return found + ["Dynamo's frontend asks for no API key; put a proxy before it"] * bool(launch.secrets)


def render(launch: Launch) -> str:
    """Frontend on the server's port, one worker with its system port on 8081; both end together."""
    return SCRIPT.format(
        host=launch.server[launch.server.index("--host") + 1],
        port=launch.port,
        files="".join(f"{each}\n" for each in here_documents(launch.files)),
        worker=command((*launch.worker, *launch.options)),
    )
