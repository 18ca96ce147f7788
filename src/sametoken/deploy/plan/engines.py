"""The engines and the targets of a plan, by the names that users give them."""

from __future__ import annotations

from collections.abc import Callable

from sametoken.deploy.plan import compose, dynamo, kubernetes, ours, sglang, shell, slurm, trtllm, vllm
from sametoken.deploy.plan.launch import Launch, Wanted

ENGINES: dict[str, Callable[[Wanted], Launch]] = {
    "sametoken": ours.translate,
    "vllm": vllm.translate,
    "sglang": sglang.translate,
    "trtllm": trtllm.translate,
}
TARGETS: dict[str, Callable[[Launch], str]] = {
    "shell": shell.render,
    "compose": compose.render,
    "kubernetes": kubernetes.render,
    "slurm": slurm.render,
    "dynamo": dynamo.render,
}
