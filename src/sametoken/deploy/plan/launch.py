"""Model and options to serve, the command that serves them, and a check that the command uses all stated options."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from sametoken.errors import ConfigError
from sametoken.options.serving import OPTIONS
from sametoken.options.speculation import SpeculativeConfig

# Reasons for all engines but ours.
EVERYWHERE = {"adaptive": "its drafts have one length; set --no-adaptive, and --max-draft-len or --draft-len-schedule"}


class Wanted(NamedTuple):
    """Model and options to serve, by our names.

    Attributes:
        model: directory or Hub id of the target.
        draft: directory or Hub id of the draft, or None.
        method: our name of the kind of drafter; None without drafts.
        speculative: options of speculation, with defaults.
        stated: options stated by the user, by our names, with those of speculation and without API keys.
        keys: true if clients need an API key.
        extra: further arguments of the engine, unchanged.
        image: requested container image; "" for the engine's default.
        layers: blocks of the target whose outputs the draft reads; () if none, or if unknown.
    """

    model: str
    draft: str | None
    method: str | None
    speculative: SpeculativeConfig
    stated: Mapping[str, Any]
    keys: bool = False
    extra: tuple[str, ...] = ()
    image: str = ""
    layers: tuple[int, ...] = ()

    @property
    def places(self) -> tuple[str, ...]:
        """Directories or Hub ids of the model and of the draft."""
        return (self.model,) if self.draft is None else (self.model, self.draft)

    @property
    def served(self) -> str:
        """Name of the model for clients; the model itself by default."""
        return str(self.stated.get("served_model_name", (self.model,))[0])

    @property
    def gpus(self) -> int:
        """Number of GPUs that compute; 0 for the CPU."""
        sizes: list[int] = [self.stated.get(f"{way}_parallel_size", 1) for way in ("tensor", "data")]
        return 0 if self.stated.get("device") == "cpu" else math.prod(sizes)


@dataclass(frozen=True)
class Launch:
    """Command that starts an engine.

    Attributes:
        engine: title of the engine.
        program: words before the options.
        script: words before the options, after a Python interpreter.
        worker: words before the options of its Dynamo worker.
        options: options of the engine.
        server: options of its HTTP server, which a Dynamo worker lacks.
        image: container image.
        port: port of the server.
        gpus: number of GPUs; 0 for the CPU.
        served: name of the model for clients.
        places: directories or Hub ids of model and draft.
        metrics: path of the Prometheus metrics; "" for none.
        files: contents of further files by name; options refer to them by name.
        secrets: environment variables with API keys.
        notes: notes for the user, a sentence each.
        ranks: number of tensor-parallel ranks.
        nodes: number of hosts.
    """

    engine: str
    program: tuple[str, ...]
    script: tuple[str, ...]
    worker: tuple[str, ...]
    options: tuple[str, ...]
    server: tuple[str, ...]
    image: str
    port: int
    gpus: int
    served: str
    places: tuple[str, ...]
    metrics: str = "/metrics"
    files: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    ranks: int = 1
    nodes: int = 1

    @property
    def words(self) -> tuple[str, ...]:
        """Words of the complete command."""
        return (*self.program, *self.options, *self.server)

    def inside(self, folder: str) -> Launch:
        """Launch for a container: files in `folder`, and a server on all interfaces."""

        def moved(words: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(f"{folder}/{word}" if word in self.files else word for word in words)

        place = self.server.index("--host") + 1
        server = (*self.server[:place], "0.0.0.0", *self.server[place + 1 :])
        return replace(self, program=moved(self.program), worker=moved(self.worker), server=server)

    def module(self, python: str) -> tuple[str, ...]:
        """Words before the options, with `python` as interpreter."""
        return (python, *self.script)

    @property
    def host(self) -> str:
        """Listening address of the server."""
        return self.server[self.server.index("--host") + 1]

    @property
    def folders(self) -> list[str]:
        """Model and draft, as far as they are directories of this machine."""
        return [place for place in self.places if place.startswith("/")]

    @property
    def name(self) -> str:
        """Name of the model as a service name: lower-case letters, digits and dashes."""
        last = self.served.rstrip("/").rpartition("/")[2].lower()
        return re.sub(r"[^a-z0-9]+", "-", last).strip("-")[:40].rstrip("-") or "model"


class Stated:
    """Options stated by the user, as attributes by our names; records those that a template reads."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values, self._read = dict(values), set[str]()

    def __getattr__(self, name: str) -> Any:
        """Value of an option; None if it was not stated."""
        if name not in OPTIONS:
            raise AttributeError(name)
        self._read.add(name)
        return self._values.get(name)

    def finish(self, engine: str, reasons: Mapping[str, str]) -> None:
        """Raise ConfigError for the first option that no template read and that differs from our default.

        Args:
            engine: title of the engine.
            reasons: reason and advice by our name of the option.

        Raises:
            ConfigError: the engine has no such option.
        """
        for name, value in self._values.items():
            usual = False if name == "adaptive" else OPTIONS[name].field.default  # other engines: one length
            if name in self._read or value == usual:
                continue
            reason = (EVERYWHERE | dict(reasons)).get(name, "it has no such option; leave it out")
            raise ConfigError(f"{engine} has no option for {spelled(name)}: {reason}; --engine sametoken supports it")


def spelled(name: str) -> str:
    """Our option on the command line."""
    return f"--{name.replace('_', '-')}"
