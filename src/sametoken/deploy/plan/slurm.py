"""A launch as a batch script for Slurm, on one node or on several that share a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from sametoken.deploy.plan.launch import Launch
from sametoken.deploy.plan.text import command, here_documents
from sametoken.deploy.slurm import FIRST_ADDRESS, WAIT_FUNCTION, header
from sametoken.errors import ConfigError

SCRIPT = """{header}set -e
{ended}{files}{meeting}srun {srun}{command} &
server=$!
# To srun itself a signal would be the end of its tasks, with the streams that they have open.
stop() {{ scancel --signal=TERM "$SLURM_JOB_ID.0"; }}
trap stop TERM INT
for ((second = 0; ; second++)); do
    curl --silent --fail --output /dev/null http://127.0.0.1:{port}/health && break
    kill -0 $server 2>/dev/null || {{ wait $server; exit 1; }}
    ((second < 1800)) || {{ echo "the server did not answer within 1800 s" >&2; stop; exit 1; }}
    sleep 1
done
echo "http://$(hostname):{port} answers"
ended $server
"""
NODES = """nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
"""


class Across(NamedTuple):
    """Options by which an engine's ranks on several nodes find each other.

    Attributes:
        srun: further words of srun. `before`: words before the engine's.
        options: words after the engine's, in which {nodes} is how many; the shell of each task reads them.
        each: whether srun starts a task for each rank, rather than one for each node.
    """

    srun: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    options: str = ""
    each: bool = True


ACROSS: Mapping[str, Across] = {
    "sametoken": Across(),
    "TensorRT-LLM": Across(srun=("--mpi=pmix",), before=("trtllm-llmapi-launch",)),
    "vLLM": Across(
        options='--nnodes {nodes} --node-rank "$SLURM_PROCID" --master-addr "$first" '
        "$( ((SLURM_PROCID == 0)) || echo --headless)",
        each=False,
    ),
    "SGLang": Across(
        options='--nnodes {nodes} --node-rank "$SLURM_PROCID" --dist-init-addr "$first:20000"', each=False
    ),
}


def render(launch: Launch) -> str:
    """Start the server, wait for /health at most 30 minutes, and end when it ends or Slurm says so."""
    inside, words = launch.inside("."), list[str]()
    if launch.nodes == 1:
        tasks, gpus = ["--nodes=1", "--ntasks=1"], [f"--gpus={launch.gpus}"] * bool(launch.gpus)
        started = command(inside.words)
    else:
        across = ACROSS[launch.engine]
        share, rest = divmod(launch.ranks, launch.nodes)
        if rest or not share:
            raise ConfigError(
                f"--nodes {launch.nodes} cannot share --tp-size {launch.ranks} equally; give a number that divides it"
            )
        tasks = [f"--nodes={launch.nodes}", f"--ntasks-per-node={share if across.each else 1}"]
        gpus = [f"--gpus-per-node={share}"] * bool(launch.gpus)
        words = [*across.srun, f"--nodes={launch.nodes}", *tasks[1:], "--kill-on-bad-exit=1"]
        started = command((*across.before, *inside.words))
        if across.options:
            own = across.options.format(nodes=launch.nodes)
            started = f"bash -c 'exec \"$@\" {own}' serve \\\n    {started}"
    return SCRIPT.format(
        header=header(f"--job-name={launch.name}", *tasks, *gpus, "--output=%x-%j.log", "--signal=B:TERM@90"),
        ended=WAIT_FUNCTION,
        files="".join(f"{each}\n" for each in here_documents(launch.files)),
        meeting=f"{NODES}{FIRST_ADDRESS}export first\n" if launch.nodes > 1 and ACROSS[launch.engine].options else "",
        srun="".join(f"{word} " for word in words),
        command=started,
        port=launch.port,
    )
