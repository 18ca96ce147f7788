"""`sametoken deploy plan`: print the command, YAML or JSON that serves a model and its draft with an engine."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from typing import Annotated

from pydantic import Field

from sametoken.commands import serve
from sametoken.commands.options import Chosen, Option
from sametoken.commands.planning import planned
from sametoken.errors import ConfigError, shown, unknown_name

Nodes = Annotated[int, Field(ge=1, le=64)]
IMAGE_HELP = "container image; without it: the engine's own. Its version decides names of keys of TensorRT-LLM."
TARGETS = ("shell", "compose", "kubernetes", "slurm", "dynamo")
OPTIONS = (
    Option("target", str, "shell", "form of what is printed.", "|".join(TARGETS)),
    Option("image", str, None, IMAGE_HELP, "NAME"),
    Option("nodes", Nodes, 1, "for slurm: number of nodes that share --tensor-parallel-size equally."),
    *(option for option in serve.OPTIONS if option not in serve.STARTED),
)
EXAMPLES = {
    "print a command": "sametoken deploy plan MODEL --draft HEAD",
    "print a deployment of vLLM": "sametoken deploy plan MODEL --draft HEAD --engine vllm --target kubernetes",
}


def computes(values: Chosen) -> bool:
    """False, because this process computes nothing, independent of the planned number of ranks."""
    return False


def command(model: str | None, values: Chosen) -> int:
    """Print the command or the files that serve a model and its draft with sametoken, vLLM, SGLang or TensorRT-LLM.

    Takes the options of `sametoken serve`. An option that the engine does not have is an error. If the engine needs the
    head in another layout, --out is the directory for it. Notes go to standard error; keys are never printed.
    """
    from sametoken.deploy.plan.engines import notes_of, render_target

    if values["target"] not in TARGETS:
        raise ConfigError(unknown_name("target", values["target"], TARGETS))
    named = values["target"] in ("compose", "kubernetes") or values["engine"] == "trtllm"
    if values["image"] is not None and not named:
        raise ConfigError("--image is for --target compose and kubernetes, and --engine trtllm; leave it out")
    if values["image"] is not None and not re.fullmatch(r"[\w./:@-]+", values["image"]):
        raise ConfigError(f"--image {shown(values['image'])}: expected a name such as registry/name:tag")
    if values["nodes"] > 1 and values["target"] != "slurm":
        raise ConfigError("--nodes is for --target slurm; leave it out, or start each host with `deploy two-node`")
    if values["port"] == 0 and values["target"] != "shell":
        raise ConfigError("--port 0 is any free port; --target needs one that others can be told")
    launch, notes = planned(model, values)
    ranks = values["tensor_parallel_size"]
    launch = replace(launch, image=values["image"] or launch.image, ranks=ranks, nodes=values["nodes"])
    if launch.nodes > 1 and launch.files:
        notes = [*notes, "start the job in a folder that all nodes see: the server's files are written there"]
    if values["target"] == "dynamo":
        notes = [*notes, *notes_of(launch)]
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    print(render_target(values["target"], launch), end="")
    return 0
