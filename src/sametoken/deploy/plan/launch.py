"""Model and options to serve, the command that serves them, and the check that no stated option is lost between
them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from sametoken import kinds
from sametoken.errors import ConfigError
from sametoken.options.serving import OPTIONS
from sametoken.options.speculation import SpeculativeConfig

ADAPTIVE = "its drafts have one length; set --no-adaptive, and --max-draft-len or --draft-len-schedule"
NO_TREES = "it verifies chains only; set --tree-top-k 1, or use an engine with trees for this draft"
EVERYWHERE = {"adaptive": ADAPTIVE}  # reasons of every engine but ours


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
    def folders(self) -> list[str]:
        """Model and draft where they are directories of this machine."""
        return [place for place in self.places if place.startswith("/")]

    @property
    def name(self) -> str:
        """The model's name as that of a service: lower-case letters, digits and dashes."""
        last = self.served.rstrip("/").rpartition("/")[2].lower()
        return re.sub(r"[^a-z0-9]+", "-", last).strip("-")[:40].rstrip("-") or "model"


class Stated:
    """The options that a user stated, taken out one by one."""

    def __init__(self, engine: str, wanted: Wanted) -> None:
        self.engine = engine
        self._left = dict(wanted.stated)

    def take(self, name: str, default: Any = None) -> Any:
        """An option's value, once; `default` where it was not stated."""
        return self._left.pop(name, default)

    def named(self, table: Mapping[str, str], convert: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
        """The engine's names and values of the options of a table, in its order.

        Args:
            table: the engine's name by ours.
            convert: the engine's value for ours, by our name; `ValueError` says why there is none.

        Raises:
            ConfigError: a value cannot be expressed.
        """
        found = {}
        for name, theirs in table.items():
            if name not in self._left:
                continue
            value = self._left.pop(name)
            try:
                found[theirs] = convert[name](value) if name in convert else value
            except ValueError as error:
                raise ConfigError(f"{spelled(name)} {value}: {self.engine} {error}") from error
        return found

    def finish(self, reasons: Mapping[str, str]) -> None:
        """Refuse what is left, unless it equals our default.

        Args:
            reasons: why the engine cannot have it and what to do, by our name of the option.

        Raises:
            ConfigError: names the first that is left.
        """
        for name, value in self._left.items():
            usual = False if name == "adaptive" else OPTIONS[name].field.default  # theirs: drafts of one length
            if value == usual:
                continue
            reason = (EVERYWHERE | dict(reasons)).get(name, "it has no such option; leave it out")
            raise ConfigError(
                f"{self.engine} has no option for {spelled(name)}: {reason}; --engine sametoken supports it"
            )


def spelled(name: str) -> str:
    """One of our options as users write it."""
    return f"--{name.replace('_', '-')}"


def words(options: Mapping[str, Any], dashes: bool = True) -> tuple[str, ...]:
    """Names and values as words of a command line: True is the flag alone, False the flag with `no-`.

    Args:
        dashes: whether names have them in the place of underscores.
    """
    found: list[str] = []
    for name, value in options.items():
        flag = spelled(name) if dashes else f"--{name}"
        if isinstance(value, bool):
            found.append(flag if value else f"--no-{flag.removeprefix('--')}")
        elif isinstance(value, list | tuple):
            found += [flag, *map(str, value)]
        else:
            found += [flag, str(value)]
    return tuple(found)


def name_of(method: str, tool: str, engine: str) -> str:
    """Name of a kind of drafter in an engine.

    Args:
        tool: the engine's name in the records of kinds. engine: its name for people.

    Raises:
        ConfigError: it has no such drafts.
    """
    known = {kind.name: kind.aliases[tool][0] for kind in kinds.kinds() if tool in kind.aliases}
    if method not in known:
        raise ConfigError(
            f"--method {method}: {engine} has no such drafts; expected one of {', '.join(known)}, or use --engine "
            "sametoken"
        )
    return known[method]
