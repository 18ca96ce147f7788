"""`sametoken deploy dynamo`, which is `python -m sametoken.deploy.dynamo`: a worker of NVIDIA Dynamo."""

from __future__ import annotations

import logging
import os
from functools import partial

from sametoken import embedded
from sametoken.commands import planning, serve
from sametoken.commands.options import Chosen, Option, titled
from sametoken.commands.resolution import resolve
from sametoken.errors import ConfigError
from sametoken.options.declaration import declared
from sametoken.options.server import ServerConfig

SERVER = ("served_model_name", "max_queue", "request_timeout", "max_chunks_per_second", "log_level", "log_format")
OWN = titled(
    "NVIDIA Dynamo",
    Option("model", str, None, "MODEL, as Dynamo's other workers spell it.", "MODEL"),
    Option("namespace", str, None, "Dynamo's namespace; without it: DYN_NAMESPACE, or dynamo.", "NAME"),
    Option(
        "endpoint", str, None,
        "where it answers: dyn://NAMESPACE.COMPONENT.ENDPOINT; without it: DYN_ENDPOINT, or the namespace's "
        "backend.generate.",
        "NAME",
    ),
    Option(
        "discovery_backend", str, None,
        "where workers are listed: etcd, kubernetes, file or mem; without it: DYN_DISCOVERY_BACKEND, or etcd.", "NAME",
    ),
    Option("request_plane", str, None, "how requests come: tcp or nats; without it: DYN_REQUEST_PLANE or tcp.", "NAME"),
    Option("event_plane", str, None, "how KV events go: zmq or nats; without it: DYN_EVENT_PLANE or zmq.", "NAME"),
)  # fmt: skip
HTTP = declared(ServerConfig).keys() - set(SERVER)
ELSEWHERE = (*planning.OPTIONS, *serve.STARTED)  # other engines
OPTIONS = (*OWN, *(each for each in serve.OPTIONS if each.name not in HTTP and each not in ELSEWHERE))
NAMES = {option.name for option in OPTIONS}
LOG = logging.getLogger("sametoken")
EXAMPLES = {
    "start a worker that etcd lists": "sametoken deploy dynamo MODEL --draft DRAFT",
    "start one without etcd, with a frontend beside it on the same machine":
        "sametoken deploy dynamo MODEL --draft DRAFT --discovery-backend file",
}  # fmt: skip


def command(model: str | None, values: Chosen) -> int:
    """Serve a model as a worker of NVIDIA Dynamo, behind its frontend and router.

    Accepts the options of `sametoken serve` that are not about HTTP. Needs ai-dynamo, and the services of its planes.
    """
    if model is not None and values["model"] is not None:
        raise ConfigError(f"got the model twice, {model} and --model {values['model']}; leave one out")
    model = values["model"] if model is None else model

    from sametoken.deploy.dynamo.preflight import Address, check, planes_of

    planes = planes_of(os.environ, values["discovery_backend"], values["request_plane"], values["event_plane"])
    address = Address.of(os.environ, values["namespace"], values["endpoint"])
    check(planes, os.environ)
    resolution = resolve(model, values)
    config = ServerConfig(**{name: resolution.values[name] for name in SERVER})
    info = serve.resolved(model, resolution, config)

    from sametoken.checkpoint.hub import resolve as found
    from sametoken.deploy.dynamo.engine import Served, run_worker
    from sametoken.server.logs import configure

    configure(config.log_level, config.log_format)
    del info["server"]
    for line in serve.described(info):
        LOG.info(line)
    unused = [f"{origin} has no effect on a worker" for name, origin in resolution.origins.items() if name not in NAMES]
    for note in (*resolution.notes, *unused):
        LOG.warning(note)
    directory = found(embedded.target(model or embedded.NAME), resolution.values["revision"], weights=False)
    name, *aliases = config.served_model_name or (info["model"],)
    served = Served(str(directory), name, tuple(aliases))
    run_worker(partial(serve.open_engine, model, resolution), served, config, address, planes)
    return 0
