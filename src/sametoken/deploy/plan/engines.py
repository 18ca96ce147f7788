"""Engines and targets of deployments by name, each with a template in `deploy/templates`.

An engine's template has a section for each field of a `Launch`, below a line [FIELD].
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any, NoReturn

from markupsafe import Markup

from sametoken import kinds
from sametoken.deploy.plan.launch import Launch, Stated, Wanted, spelled
from sametoken.deploy.templates import render
from sametoken.errors import ConfigError
from sametoken.options.serving import elsewhere

FOLDER = "/etc/sametoken"  # folder of the files of a launch in a container
HUB_CACHE = "/cache/huggingface"  # value of HF_HOME in a container
# Template of each target, and the argument of `Launch.inside`; None for a server at the stated address.
FORMS = {
    "shell": ("shell.sh", None),
    "compose": ("compose.yml", FOLDER),
    "kubernetes": ("kubernetes.yml", FOLDER),
    "slurm": ("slurm.sh", "."),
    "dynamo": ("dynamo.sh", None),
}
INFRASTRUCTURE = (
    "etcd (port 2379) and NATS (port 4222) must run first, as `docker compose -f deploy/docker-compose.yml up -d` in "
    "Dynamo's repository starts them. On one host DYN_DISCOVERY_BACKEND=file DYN_REQUEST_PLANE=tcp DYN_EVENT_PLANE=zmq "
    "needs neither"
)
TITLES = {"sametoken": "sametoken", "vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}
OURS, TRTLLM = "sametoken", "trtllm"
NEWER = "nvcr.io/nvidia/tensorrt-llm/release:1.3.0rc12"
OLD_NAMES, NEW_NAMES = "trtllm-1.2", "trtllm-1.3"  # keys of `Kind.aliases`
MOST = 65536  # sequences of a batch; larger than vLLM's limits
SECTION = re.compile(r"(?m)^\[(\w+)\]\n")


def translate(engine: str, wanted: Wanted) -> Launch:
    """Command of an engine, and its files.

    Raises:
        ConfigError: the engine has no option for a stated one.
    """
    stated, title = Stated(wanted.stated), TITLES[engine]
    values: dict[str, Any] = wanted._asdict() | {
        "o": stated,
        "s": wanted.speculative,
        "kind": None if engine == OURS or wanted.method is None else name_of(wanted.method, engine, wanted.image),
        "host": wanted.stated.get("host", "127.0.0.1"),
        "port": wanted.stated.get("port", 8000),
        "served": wanted.served,
        "gpus": wanted.gpus,
        "ranges": ranges,
        "refuse": _refuse,
        "own": lambda group: _own_keys(engine, group, stated, wanted),
        "as_stated": lambda name: Markup(shlex.join(own_words(name, getattr(stated, name)))),
    }
    stated.host, stated.port  # noqa: B018  # marks them as read: templates use `host` and `port` of `values`
    text = render(f"{engine}.sh", values)
    _, *parts = SECTION.split(text)
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    files = {name: render(name, values) for name in sections.get("files", "").split()}
    stated.finish(title, dict(line.split(": ", 1) for line in sections.pop("refused").splitlines()))
    words: dict[str, Any] = {
        name: tuple(shlex.split(sections[name])) for name in ("program", "script", "worker", "options", "server")
    }
    return Launch(
        engine=title,
        **words,
        image=sections["image"].strip(),
        port=values["port"],
        gpus=int(sections.get("gpus", wanted.gpus)),
        served=wanted.served,
        places=wanted.places,
        metrics=sections.get("metrics", "/metrics").strip(),
        files=files,
        secrets=tuple(sections.get("secrets", "").split()),
        notes=tuple(sections.get("notes", "").splitlines()),
    )


ENGINES: dict[str, Callable[[Wanted], Launch]] = {name: partial(translate, name) for name in TITLES}


def _refuse(reason: str) -> NoReturn:
    """Raise ConfigError for an option that a template cannot express."""
    raise ConfigError(reason)


def _own_keys(engine: str, group: str, stated: Stated, wanted: Wanted) -> dict[str, Any]:
    """Keys and values of a group of the engine's speculative configuration; marks their options as read."""
    names = elsewhere(engine, group)
    for ours in names.values():
        getattr(stated, ours)
    return {theirs: getattr(wanted.speculative, ours) for theirs, ours in names.items()}


def own_words(name: str, value: Any) -> list[str]:
    """Words of an option on our command line: tables as SIZE:LENGTH or JSON, an option for each of several values."""
    if isinstance(value, bool):
        return [spelled(name if value else f"no_{name}")]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        value = json.dumps(value)
    elif isinstance(value, Mapping):
        value = ",".join(f"{key}:{each}" for key, each in value.items())
    several = value if isinstance(value, list | tuple) else (value,)
    return [word for each in several for word in (spelled(name), str(each))]


def ranges(schedule: dict[int, int]) -> list[list[int]]:
    """Ranges [[first, last, tokens], ...] of a table of tokens by last batch size.

    The last range has 0 tokens: beyond the given ranges, vLLM would use the last length.
    """
    found, first = [], 1
    for last, tokens in sorted(schedule.items()):
        found.append([first, last, tokens])
        first = last + 1
    return [*found, [first, MOST, 0]]


def name_of(method: str, engine: str, image: str) -> str:
    """Name of a kind of drafter in an engine.

    Args:
        method: our name of the kind.
        engine: key of `TITLES`.
        image: container image; its version selects the names of TensorRT-LLM, which changed with 1.3.

    Raises:
        ConfigError: the engine has no such drafts.
    """
    tool, title = engine, TITLES[engine]
    if engine == TRTLLM:
        found = re.search(r":v?(\d+)\.(\d+)", image)
        tool = NEW_NAMES if found and (int(found[1]), int(found[2])) >= (1, 3) else OLD_NAMES
        if (aliases := kinds.named(method).aliases) and tool not in aliases and NEW_NAMES in aliases:
            raise ConfigError(f"--method {method}: {title} has such drafts since 1.3; give --image {NEWER}")
    known = {kind.name: kind.aliases[tool][0] for kind in kinds.kinds() if tool in kind.aliases}
    if method not in known:
        raise ConfigError(
            f"--method {method}: {title} has no such drafts; expected one of {', '.join(known)}, or use --engine "
            "sametoken"
        )
    return known[method]


def render_target(target: str, launch: Launch) -> str:
    """Text of the file of a target.

    Raises:
        ConfigError: the number of nodes does not divide the number of ranks.
    """
    template, folder = FORMS[target]
    share, rest = divmod(launch.ranks, launch.nodes)
    if launch.nodes > 1 and (rest or not share):
        raise ConfigError(
            f"--nodes {launch.nodes} cannot share --tp-size {launch.ranks} equally; give a number that divides it"
        )
    values: dict[str, Any] = asdict(launch if folder is None else launch.inside(folder)) | {
        "name": launch.name, "host": launch.host, "share": share, "folders": launch.folders,
        "folder": FOLDER, "cache": HUB_CACHE,
    }  # fmt: skip
    return render(template, values | {"words": values["program"] + values["options"] + values["server"]})


TARGETS: dict[str, Callable[[Launch], str]] = {name: partial(render_target, name) for name in FORMS}


def notes_of(launch: Launch) -> list[str]:
    """Notes for Dynamo, a sentence each: services that must run, and server options that a worker lacks."""
    kept = ("--host", "--port", "--served_model_name")
    lost = [word for word in launch.server if word.startswith("--") and word not in kept]
    found = [f"{', '.join(lost)}: left out, since Dynamo's frontend is the server"] if lost else []
    found = [INFRASTRUCTURE, *found]
    return found + ["Dynamo's frontend requires no API key; put a proxy before it"] * bool(launch.secrets)
