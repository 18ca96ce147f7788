"""A launch as a script with NVIDIA Dynamo: its frontend, and the engine as a worker behind it."""

from __future__ import annotations

from sametoken.deploy.plan.launch import Launch
from sametoken.deploy.plan.text import command, here_documents

SCRIPT = """#!/bin/bash
set -e
trap 'echo Cleaning up...; kill 0' EXIT
{files}python -m dynamo.frontend --http-port={port} &
DYN_SYSTEM_PORT=8081 {worker} &
wait -n
"""


def render(launch: Launch) -> str:
    """Frontend on the server's port, one worker with its system port on 8081; both end together.

    Options of the HTTP server fall away: the frontend is the server.
    """
    return SCRIPT.format(
        port=launch.port,
        files="".join(f"{each}\n" for each in here_documents(launch.files)),
        worker=command((*launch.worker, *launch.options)),
    )
