"""Model and options to serve, the command that serves them, and the check that no stated option is lost between
them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from sametoken.errors import ConfigError
from sametoken.options.serving import OPTIONS
from sametoken.options.speculation import SpeculativeConfig

# Reasons of every engine but ours.
EVERYWHERE = {"adaptive": "its drafts have one length; set --no-adaptive, and --max-draft-len or --draft-len-schedule"}


class Wanted(NamedTuple):
    """Model and options to serve, by our names.

    Attributes:
        model, draft: directories or Hub ids; None is no draft.
        method: our name of the kind of drafter, None without drafts.
        speculative: how drafts are made, defaults included.
        stated: the other options that a user stated, by our names; speculation is among them, API keys are not.
        keys: whether clients need an API key.
        extra: words for the engine, as they are.
        image: the container image that was asked for, "" for the engine's own.
        layers: the target's blocks whose outputs the draft reads; () is none, or not known.
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
        """Name of the model for clients."""
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
        engine: its name for people.
        program: the words before the options; script: the same after the interpreter of the environment where the
            engine is installed; worker: the same for its worker behind Dynamo.
        options: of the engine, as words. server: options of its HTTP server, which a worker has not.
        image: of a container with it.
        files: contents by name; the options name them without a folder.
        secrets: environment variables that hold API keys.
        port: where it answers. metrics: path of its Prometheus metrics, "" for none.
        gpus: how many it computes on; 0 is the CPU. ranks: how many parts each of its models has.
        nodes: on how many hosts.
        served: what clients call the model.
        places: model and draft.
        notes: what to know, a sentence each.
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
        """The whole command."""
        return (*self.program, *self.options, *self.server)

    def inside(self, folder: str) -> Launch:
        """Launch for a container: files in a folder, and a server that other hosts reach."""

        def moved(words: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(f"{folder}/{word}" if word in self.files else word for word in words)

        place = self.server.index("--host") + 1
        server = (*self.server[:place], "0.0.0.0", *self.server[place + 1 :])
        return replace(self, program=moved(self.program), worker=moved(self.worker), server=server)

    def module(self, python: str) -> tuple[str, ...]:
        """The words before the options, run by a certain Python."""
        return (python, *self.script)

    @property
    def host(self) -> str:
        """Address where the server listens."""
        return self.server[self.server.index("--host") + 1]

    @property
    def folders(self) -> list[str]:
        """Model and draft where they are directories of this machine."""
        return [place for place in self.places if place.startswith("/")]

    @property
    def name(self) -> str:
        """The model's name as that of a service: lower-case letters, digits and dashes."""
        last = self.served.rstrip("/").rpartition("/")[2].lower()
        return re.sub(r"[^a-z0-9]+", "-", last).strip("-")[:40].rstrip("-") or "model"


class Stated:
    """The options that a user stated, as attributes by our names; those that a template reads are noted."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values, self._read = dict(values), set[str]()

    def __getattr__(self, name: str) -> Any:
        """Value of an option, None where it was not stated."""
        if name not in OPTIONS:
            raise AttributeError(name)
        self._read.add(name)
        return self._values.get(name)

    def finish(self, engine: str, reasons: Mapping[str, str]) -> None:
        """Refuse what was not read, unless it equals our default.

        Args:
            engine: its name for people.
            reasons: why the engine cannot have it and what to do, by our name of the option.

        Raises:
            ConfigError: names the first that is left.
        """
        for name, value in self._values.items():
            usual = False if name == "adaptive" else OPTIONS[name].field.default  # theirs: drafts of one length
            if name in self._read or value == usual:
                continue
            reason = (EVERYWHERE | dict(reasons)).get(name, "it has no such option; leave it out")
            raise ConfigError(f"{engine} has no option for {spelled(name)}: {reason}; --engine sametoken supports it")


def spelled(name: str) -> str:
    """One of our options as users write it."""
    return f"--{name.replace('_', '-')}"
