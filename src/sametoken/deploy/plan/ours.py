"""The command of `sametoken serve` for a speculative configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sametoken.deploy.plan.launch import Launch, Wanted, spelled

NAME, SECRET = "sametoken", "SAMETOKEN_API_KEY"
SERVER = (
    "host", "port", "data_parallel_size", "max_queue", "request_timeout", "max_body", "drain_seconds",
    "max_chunks_per_second", "cors_origin", "keep_alive", "root_path", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs",
    "ssl_cert_reqs", "log_level", "log_format", "access_log",
)  # fmt: skip


def translate(wanted: Wanted) -> Launch:
    """The command of our server; everything can be told."""
    engine = {name: value for name, value in wanted.stated.items() if name not in SERVER}
    server: dict[str, Any] = {"host": "127.0.0.1", "port": 8000}
    server |= {name: value for name, value in wanted.stated.items() if name in SERVER}
    chosen = {"draft": wanted.draft, "method": wanted.method}
    gpus = wanted.gpus if wanted.stated.get("device") == "cuda" else 0  # on the CPU unless a GPU is asked for
    options = _words({name: value for name, value in chosen.items() if value is not None} | engine)
    return Launch(
        engine=NAME,
        program=("sametoken", "serve", wanted.model),
        script=("-m", "sametoken.cli", "serve", wanted.model),
        worker=("python", "-m", "sametoken.deploy.dynamo", "--model", wanted.model),
        options=(*options, *wanted.extra),
        server=_words(server),
        image=f"sametoken:{'cuda' if gpus else 'cpu'}",
        port=server["port"],
        gpus=gpus,
        served=wanted.served,
        places=wanted.places,
        secrets=(SECRET,) if wanted.keys else (),
    )


def _words(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Options as our command line reads them: tables as SIZE:LENGTH, several values one by one."""
    found: list[str] = []
    for name, value in options.items():
        if isinstance(value, bool):
            found.append(spelled(name) if value else spelled(f"no_{name}"))
        elif isinstance(value, Mapping):
            found += [spelled(name), ",".join(f"{key}:{each}" for key, each in value.items())]
        else:
            for each in value if isinstance(value, list | tuple) else (value,):
                found += [spelled(name), str(each)]
    return tuple(found)
