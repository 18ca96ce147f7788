"""`sametoken deploy two-node`: one model on two hosts, checked and started from the first of them."""

from __future__ import annotations

import os
from collections.abc import Iterator

from sametoken import embedded
from sametoken.commands import serve
from sametoken.commands.options import Chosen, Option
from sametoken.commands.resolution import resolve
from sametoken.errors import ConfigError

OWN = (
    Option("hosts", str, None, "addresses of both hosts, this machine's first; ssh to the second asks nothing.", "A,B"),
    Option("interface", str, None, "network interface that joins them; without it: the one that leads to A.", "NAME"),
    Option("dry_run", bool, False, "print every command and start nothing."),
)
RANKS = "tensor_parallel_size"
OPTIONS = (*OWN, *serve.OPTIONS)
MEETING = 29500


def command(model: str | None, values: Chosen) -> int:
    """Serve a model on two hosts: each holds and computes half of every matrix.

    Checks both hosts (ssh, versions, files, memory, interface, ports), starts the ranks with mpirun, asks for a first
    chat, and stays until Ctrl-C. Takes the options of `sametoken serve`.
    """
    hosts = tuple((values["hosts"] or "").split(","))
    if len(hosts) != 2 or not all(hosts) or hosts[0] == hosts[1]:
        raise ConfigError(f"--hosts is {values['hosts']!r}, expected the addresses of two hosts: --hosts A,B")
    if RANKS in values.given and values[RANKS] != len(hosts):
        raise ConfigError(f"--tp-size is {values[RANKS]}; two hosts have 2 ranks, leave it out")

    from sametoken.checkpoint.hub import resolve as found
    from sametoken.checkpoint.planned import planned_model
    from sametoken.deploy.two_node import Deployment, deploy, is_own
    from sametoken.engine.build import dtype_for
    from sametoken.model.config import ModelConfig

    resolution = resolve(model, values)
    server = serve.server_config(resolution.values)
    if not is_own(hosts[0]):
        raise ConfigError(f"{hosts[0]} is no address of this machine; run this command on the first of --hosts")
    needed = 0
    target = model or embedded.NAME
    if not values["dry_run"]:
        import torch

        from sametoken.checkpoint.hub import read_config

        place = found(embedded.target(target), resolution.values["revision"], weights=False, index=True)
        stated = ModelConfig.from_hf(read_config(place))
        dtype = dtype_for(resolution.values["dtype"], stated, torch.device("cpu"))
        planned = planned_model(place, dtype, stated.max_position, resolution.values["quantization"])
        whole = sum(share.bytes for share in planned.held.values())
        needed = (whole + planned.outside) // 2
    words = (target, *_words(values))
    if server.host == "127.0.0.1":
        words = (*words, "--host", hosts[0])
    key = server.api_key[0] if server.api_key else None
    meeting = int(os.environ.get("MASTER_PORT", MEETING))
    plan = Deployment(
        (hosts[0], hosts[1]), values["interface"], target, resolution.values["revision"], words, needed, server.port,
        meeting, key,
    )  # fmt: skip
    if values["dry_run"]:
        print("\n".join(plan.commands()))
        return 0
    return deploy(plan, lambda words: print(words, flush=True))


def _words(values: Chosen) -> Iterator[str]:
    """The options of `sametoken serve` that were given, as they are written."""
    own = {RANKS, *(option.name for option in OWN)}
    for option in OPTIONS:
        if option.name not in values.given or option.name in own:
            continue
        name, value = option.name.replace("_", "-"), values[option.name]
        if isinstance(value, bool):
            yield f"--{name}" if value else f"--no-{name}"
            continue
        for each in value if isinstance(value, list | tuple) else (value,):
            yield from (f"--{name}", str(each))
