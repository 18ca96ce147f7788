"""`sametoken deploy two-node`: one model on two hosts, checked and started from the first of them."""

from __future__ import annotations

import os
import shutil

from sametoken import embedded
from sametoken.commands import planning, serve
from sametoken.commands.elsewhere import everywhere
from sametoken.commands.options import Chosen, Option, given_words, titled
from sametoken.commands.resolution import resolve
from sametoken.errors import ConfigError
from sametoken.options.server import ServerConfig

OWN = titled(
    "Two hosts",
    Option(
        "hosts",
        str,
        None,
        "addresses of both hosts, this machine's first; ssh to the second must work without a password.",
        "A,B",
    ),
    Option("interface", str, None, "network interface that joins them; without it: the one that leads to A.", "NAME"),
    Option("dry_run", bool, False, "print every command and start nothing."),
)
RANKS = "tensor_parallel_size"
OPTIONS = (*OWN, *(each for each in serve.OPTIONS if each not in (*planning.OPTIONS, *serve.STARTED)))
OWN_WORDS = {RANKS, "api_key", *(option.name for option in OWN)}  # keys go by the environment
MEETING = 29500
EVERY = ("0.0.0.0", "::", "")  # addresses of every interface
EXAMPLES = {
    "show what would be started": "sametoken deploy two-node MODEL --hosts 10.0.0.1,10.0.0.2 --dry-run",
    "start it": "sametoken deploy two-node MODEL --hosts 10.0.0.1,10.0.0.2",
}


def command(model: str | None, values: Chosen) -> int:
    """Serve a model on two hosts: each holds and computes half of every matrix.

    Checks both hosts (ssh, versions, files, memory, interface, ports), starts the ranks with mpirun, sends a first chat
    request, and runs until Ctrl-C. Accepts the options of `sametoken serve`.
    """
    hosts = tuple((values["hosts"] or "").split(","))
    if len(hosts) != 2 or not all(hosts) or hosts[0] == hosts[1]:
        raise ConfigError(f"--hosts is {values['hosts']!r}, expected the addresses of two hosts: --hosts A,B")
    if RANKS in values.given and values[RANKS] != len(hosts):
        raise ConfigError(f"--tp-size is {values[RANKS]}; two hosts have 2 ranks, leave it out")

    from sametoken.checkpoint.hub import resolve as found
    from sametoken.checkpoint.planned import planned_bytes
    from sametoken.deploy.two_node import Deployment, deploy, is_loopback, is_own
    from sametoken.engine.load import dtype_for
    from sametoken.model.config import ModelConfig

    resolution = resolve(model, values)
    server = serve.server_config(resolution.values)
    if not is_own(hosts[0]):
        raise ConfigError(f"{hosts[0]} is no address of this machine; run this command on the first of --hosts")
    _check_server(server)
    meeting = _meeting()
    needed = 0
    target = everywhere(model)
    if not values["dry_run"]:
        if shutil.which("mpirun") is None:
            raise ConfigError("there is no mpirun here; install Open MPI on both hosts, on Debian: openmpi-bin")
        if is_loopback(hosts[0]):
            raise ConfigError(
                f"{hosts[0]} is this machine's own loopback, which {hosts[1]} cannot reach; expected the "
                "address of an interface that joins both"
            )
        import torch

        from sametoken.checkpoint.hub import read_config
        from sametoken.runtime.ranks import RankPart

        place = found(embedded.target(target), resolution.values["revision"], weights=False, index=True)
        stated = ModelConfig.from_hf(read_config(place))
        dtype = dtype_for(resolution.values["dtype"], stated, torch.device("cpu"))
        first = RankPart(0, 2, whole_head=True)
        needed = planned_bytes(place, dtype, stated.max_position, resolution.values["quantization"], first)
    given = "host" in resolution.origins
    words = (target, *given_words(OPTIONS, values, OWN_WORDS), *(() if given else ("--host", hosts[0])))
    address = next((each for each in server.hosts if given and each not in EVERY), hosts[0])
    plan = Deployment(
        (hosts[0], hosts[1]), values["interface"], target, resolution.values["revision"], words, needed, address,
        server.port, meeting, server.api_key, server.drain_seconds + 10,
    )  # fmt: skip
    if values["dry_run"]:
        print("\n".join(plan.commands()))
        return 0
    return deploy(plan, lambda words: print(words, flush=True))


def _check_server(server: ServerConfig) -> None:
    """Refuse settings of the server that this command cannot deploy. Raises ConfigError."""
    if server.port == 0:
        raise ConfigError("--port is 0, and the port must be known before the ranks start; expected 1 to 65535")
    if server.ssl_certfile is not None:
        raise ConfigError(
            "--ssl-certfile: this command asks over HTTP; leave it out, and put a proxy with HTTPS before"
        )
    for key in server.api_key:
        if "," in key or key != key.strip():
            raise ConfigError(
                f"an --api-key has a comma, or a space at an end, and {serve.KEYS_VARIABLE} separates keys by commas; "
                "expected another key"
            )


def _meeting() -> int:
    """Port of the rendezvous of the ranks. Raises ConfigError if MASTER_PORT is not a port."""
    stated = os.environ.get("MASTER_PORT") or str(MEETING)
    if not (stated.isascii() and stated.isdigit() and 0 < int(stated) < 2**16):
        raise ConfigError(f"MASTER_PORT={stated!r} in the environment: expected a number from 1 to 65535")
    return int(stated)
