"""A launch as a batch script for Slurm on one node."""

from __future__ import annotations

from sametoken.deploy.plan.launch import Launch
from sametoken.deploy.plan.text import command, here_documents
from sametoken.deploy.slurm import WAIT_FUNCTION, header

SCRIPT = """{header}set -e
{ended}{files}srun {command} &
server=$!
trap 'kill -TERM $server' TERM INT
for ((second = 0; ; second++)); do
    curl --silent --fail --output /dev/null http://127.0.0.1:{port}/health && break
    kill -0 $server 2>/dev/null || {{ wait $server; exit 1; }}
    ((second < 1800)) || {{ echo "the server did not answer within 1800 s" >&2; kill -TERM $server; exit 1; }}
    sleep 1
done
echo "http://$(hostname):{port} answers"
ended $server
"""


def render(launch: Launch) -> str:
    """Starts the server, waits for /health at most 30 minutes, and ends when it ends or Slurm says so."""
    inside = launch.inside(".")
    gpus = [f"--gpus={launch.gpus}"] * bool(launch.gpus)
    return SCRIPT.format(
        header=header(
            f"--job-name={launch.name}", "--nodes=1", "--ntasks=1", *gpus, "--output=%x-%j.log", "--signal=B:TERM@90"
        ),
        ended=WAIT_FUNCTION,
        files="".join(f"{each}\n" for each in here_documents(launch.files)),
        command=command(inside.words),
        port=launch.port,
    )
