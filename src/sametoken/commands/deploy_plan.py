"""`sametoken deploy plan`: the command, YAML or JSON that serves a model and its draft with an engine."""

from __future__ import annotations

import re
import sys
from dataclasses import replace

from sametoken.commands import serve
from sametoken.commands.options import Chosen, Option
from sametoken.commands.planning import planned
from sametoken.errors import ConfigError, shown, unknown_name

TARGETS = ("shell", "compose", "kubernetes", "slurm", "dynamo")
OPTIONS = (
    Option("target", str, "shell", "form of what is printed.", "|".join(TARGETS)),
    Option("image", str, None, "container image; without it: the engine's own.", "NAME"),
    *(option for option in serve.OPTIONS if option not in serve.STARTED),
)
EXAMPLES = {
    "print a command": "sametoken deploy plan MODEL --draft HEAD",
    "print a deployment of vLLM": "sametoken deploy plan MODEL --draft HEAD --engine vllm --target kubernetes",
}


def computes(values: Chosen) -> bool:
    """Nothing is computed, however many ranks are planned."""
    return False


def command(model: str | None, values: Chosen) -> int:
    """Print the command or the files that serve a model and its draft with sametoken, vLLM, SGLang or TensorRT-LLM.

    Takes the options of `sametoken serve`. An option that the engine does not have is an error. If the engine needs the
    head in another layout, --out is the directory for it. Notes go to standard error; keys are never printed.
    """
    from sametoken.deploy.plan.dynamo import left_out
    from sametoken.deploy.plan.engines import TARGETS as FORMS

    if values["target"] not in TARGETS:
        raise ConfigError(unknown_name("target", values["target"], TARGETS))
    if values["image"] is not None and values["target"] not in ("compose", "kubernetes"):
        raise ConfigError("--image is for --target compose and kubernetes; leave it out")
    if values["image"] is not None and not re.fullmatch(r"[\w./:@-]+", values["image"]):
        raise ConfigError(f"--image {shown(values['image'])}: expected a name such as registry/name:tag")
    if values["port"] == 0 and values["target"] != "shell":
        raise ConfigError("--port 0 is any free port; --target needs one that others can be told")
    launch, notes = planned(model, values)
    if values["image"] is not None:
        launch = replace(launch, image=values["image"])
    if values["target"] == "dynamo":
        notes = [*notes, *left_out(launch)]
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    print(FORMS[values["target"]](launch), end="")
    return 0
