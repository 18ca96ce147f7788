"""Facts of one host for a deployment: `python -m sametoken.deploy.host` answers a query in JSON."""

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
        model, revision: the target, which is downloaded if it is a Hub id.
        ports: that must be free.
        environment: variables that the ranks will have.
    """

    model: str
    revision: str | None
    ports: list[int]
    environment: dict[str, str]


class HostFacts(NamedTuple):
    """Facts of a host.

    Attributes:
        facts: what must be equal on all ranks.
        digest: of the model's files, "" with the reason in `problem`.
        free: bytes of memory.
        interfaces: names. taken: ports of those asked for that are in use.
    """

    facts: dict[str, str]
    digest: str
    problem: str
    free: int
    interfaces: list[str]
    taken: list[int]


def examine(question: HostQuery) -> HostFacts:
    """This host's answer."""
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
    """The whole process. The question comes by standard input, because a command line is seen by every user."""
    question = HostQuery(*json.load(sys.stdin))
    os.environ.update(question.environment)
    answer: list[Any] = list(examine(question))
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
