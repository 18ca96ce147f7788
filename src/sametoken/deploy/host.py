"""Facts of one host for a deployment; `python -m sametoken.deploy.host` reads a query and prints facts, in JSON."""

from __future__ import annotations

import json
import os
import socket
import sys
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from sametoken.checkpoint.identity import model_digest
from sametoken.checkpoint.places import target_directory
from sametoken.errors import SametokenError
from sametoken.parallel.meeting import facts
from sametoken.runtime.memory import available_bytes


class HostQuery(NamedTuple):
    """Query to a host.

    Attributes:
        model: directory or Hub id of the target; a Hub id is downloaded.
        revision: revision on the Hub.
        ports: ports that must be free.
        environment: environment variables of the ranks.
    """

    model: str
    revision: str | None
    ports: list[int]
    environment: dict[str, str]


class HostFacts(NamedTuple):
    """Facts of a host.

    Attributes:
        facts: values that must be equal on all ranks, by name.
        digest: digest of the model's files; "" if the model is not usable.
        problem: reason for an empty digest.
        free: available memory in bytes.
        interfaces: names of the network interfaces.
        taken: ports of the query that are in use.
    """

    facts: dict[str, str]
    digest: str
    problem: str
    free: int
    interfaces: list[str]
    taken: list[int]


def examine(question: HostQuery) -> HostFacts:
    """Return the facts of this host."""
    digest = problem = ""
    try:
        digest = model_digest(target_directory(question.model, question.revision))
    except SametokenError as error:
        problem = str(error)
    interfaces = [name for _, name in socket.if_nameindex()]
    taken = [port for port in question.ports if not _free(port)]
    return HostFacts(facts(), digest, problem, available_bytes(torch.device("cpu")), interfaces, taken)


def _free(port: int) -> bool:
    with suppress(OSError), socket.create_server(("", port)):
        return True
    return False


def main() -> None:
    """Read a query from standard input and print the facts; a command line would be visible to every user."""
    question = HostQuery(*json.load(sys.stdin))
    os.environ.update(question.environment)
    answer: list[Any] = list(examine(question))
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
