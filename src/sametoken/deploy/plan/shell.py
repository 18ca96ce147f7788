"""A launch as a shell script."""

from __future__ import annotations

from sametoken.deploy.plan.launch import Launch
from sametoken.deploy.plan.text import command, here_documents


def render(launch: Launch) -> str:
    """Its files as here-documents, then its command."""
    head = [f"# Set {name} to the API key first." for name in launch.secrets]
    return "\n".join([*head, *here_documents(launch.files), command(launch.words), ""])
