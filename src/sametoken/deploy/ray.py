"""Ray jobs: synthesis of shards by actors, hidden states by actors, and training with one task per node."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from sametoken.deploy.shards import ShardServer, ShardWork
from sametoken.deploy.start import end_with_parent
from sametoken.errors import ConfigError, SametokenError

REACHED_S = 10.0  # time limit of a connection to the head node, and of the reservation of nodes, in seconds
ATTEMPTS = 3  # most starts of a training whose nodes fail
Tell = Callable[[str], object]


class RayWorkers(NamedTuple):
    """Workers that a job requests from Ray.

    Attributes:
        address: HOST:PORT of the head node; None selects the cluster of RAY_ADDRESS or of this machine.
        number: number of concurrent workers; None is one per node.
        cpus: CPUs of a worker.
        gpus: GPUs of a worker.
    """

    address: str | None
    number: int | None
    cpus: float = 1.0
    gpus: float = 0.0

    @property
    def needs(self) -> dict[str, float]:
        """Resources of one worker, as options of Ray."""
        return {"num_cpus": self.cpus, "num_gpus": self.gpus}


class Ended(NamedTuple):
    """Exit code of the command for a shard or a part, and name of the node where the command ran."""

    number: int
    code: int
    node: str


class ShardAnswerer:
    """Actor with a server on its node, which answers shards; a server that ended is started again once per shard."""

    def __init__(self, work: ShardWork) -> None:
        self._work = work
        self._server = ShardServer(work, _say)

    def run(self, number: int) -> Ended:
        """Answer shard `number`."""
        try:
            return Ended(number, self._server.answer(number), socket.gethostname())
        except SametokenError as error:
            _say(f"{error}; starting it again")
            self._server.close()
            self._server = ShardServer(self._work, _say)
            return Ended(number, self._server.answer(number), socket.gethostname())


def synthesize(workers: RayWorkers, work: ShardWork, numbers: Sequence[int], tell: Tell) -> int:
    """Answer the shards that are not complete; return the largest exit code of `sametoken synthesize`.

    Ray restarts an actor that failed and repeats its shard.

    Raises:
        SametokenError: Ray cannot be reached or has too few resources, or a server does not start.
    """
    left = work.left(numbers, tell)
    if not left:
        tell("nothing is left to answer")
        return 0
    with _connected(workers) as count:
        return _mapped(ShardAnswerer, (work,), left, workers, min(count, len(left)), "shard", tell)


class PartWriter:
    """Actor that writes parts of the hidden states, one command for each part."""

    def __init__(self, words: Sequence[str], parts: int) -> None:
        self._words, self._parts = words, parts

    def run(self, number: int) -> Ended:
        """Write part `number`."""
        return Ended(number, _command([*self._words, "--shard", f"{number}/{self._parts}"]), socket.gethostname())


def prepare(workers: RayWorkers, words: Sequence[str], tell: Tell) -> int:
    """Write hidden states, one part per worker; return the largest exit code.

    Args:
        words: arguments of `python -m`, without the number of the part.

    Raises:
        SametokenError: Ray cannot be reached or has too few resources.
    """
    with _connected(workers) as count:
        return _mapped(PartWriter, (words, count), range(count), workers, count, "part", tell)


def _mapped(
    actor: type, arguments: tuple[Any, ...], numbers: Sequence[int], workers: RayWorkers, count: int, what: str,
    tell: Tell,
) -> int:  # fmt: skip
    """Distribute numbers over a pool of actors, the next one to each free actor; return the largest exit code.

    Ray restarts an actor that failed, if necessary on another node, and repeats its call.
    """
    import ray
    from ray.util import ActorPool

    made = ray.remote(actor).options(
        max_restarts=-1, max_task_retries=-1, scheduling_strategy="SPREAD", **workers.needs
    )  # fmt: skip
    pool = ActorPool([made.remote(*arguments) for _ in range(count)])
    worst = 0
    try:
        for ended in pool.map_unordered(lambda each, number: each.run.remote(number), numbers):
            tell(f"{what} {ended.number}: exit code {ended.code} on {ended.node}")
            worst = max(worst, ended.code)
    except ray.exceptions.RayError as error:
        reason = str(error).strip().splitlines()[-1]
        raise SametokenError(f"the job of Ray failed: {reason}; see the output of its workers") from error
    return worst


def train(workers: RayWorkers, words: Sequence[str], tell: Tell) -> int:
    """Train with torchrun on as many nodes as workers; return the first exit code that is not 0, else 0.

    If a node fails, all nodes start again, at most `ATTEMPTS` times in all; training resumes from its last checkpoint.

    Args:
        words: arguments of `python -m`.

    Raises:
        SametokenError: Ray cannot be reached or has too few resources, or a node failed in each attempt.
    """
    with _connected(workers) as count:
        import ray

        for attempt in range(1, ATTEMPTS + 1):
            try:
                return _trained(workers, words, count, tell)
            except ray.exceptions.RayError as error:
                reason = str(error).strip().splitlines()[0]
                tell(f"attempt {attempt} of {ATTEMPTS} ended: {reason}")
        raise SametokenError(f"a node failed in each of {ATTEMPTS} attempts; run the command again to resume")


def _trained(workers: RayWorkers, words: Sequence[str], count: int, tell: Tell) -> int:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    needs = {"CPU": workers.cpus} | ({"GPU": workers.gpus} if workers.gpus else {})
    group = placement_group([needs] * count, strategy="STRICT_SPREAD")
    try:
        if not group.wait(REACHED_S):
            raise ConfigError(f"Ray has fewer than {count} free nodes with {needs} each; lower --workers")

        def task(function: Callable[..., Any], node: int) -> Any:
            placed = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=node)
            return ray.remote(function).options(scheduling_strategy=placed, max_retries=0, **workers.needs)

        address, port = ray.get(task(_meeting, 0).remote())
        tell(f"{count} nodes meet at {address}:{port}")
        launch = f"torch.distributed.run --nnodes={count} --nproc-per-node={max(1, int(workers.gpus))}".split()
        launch += [f"--master-addr={address}", f"--master-port={port}"]
        running = [task(_command, node).remote([*launch, f"--node-rank={node}", "-m", *words]) for node in range(count)]
        while running:
            ended, running = ray.wait(running)
            if code := ray.get(ended[0]):
                return int(code)
        return 0
    finally:
        remove_placement_group(group)  # ends the tasks that still run in it


def _meeting() -> tuple[str, int]:
    """Address of this node for other nodes, and a free port."""
    import ray.util

    with socket.create_server(("", 0)) as probe:
        return ray.util.get_node_ip_address(), probe.getsockname()[1]


def _command(words: Sequence[str]) -> int:
    """Run `python -m WORDS` on this node, end the command when this worker ends, and return its exit code."""
    words = [sys.executable, "-m", *words]
    _say(shlex.join(words))
    return subprocess.run(words, stdin=subprocess.DEVNULL, preexec_fn=end_with_parent(), check=False).returncode


def _say(line: str) -> None:
    print(line, flush=True)


@contextmanager
def _connected(workers: RayWorkers) -> Iterator[int]:
    """Connect to the cluster and yield the number of workers.

    Raises:
        ConfigError: Ray is not installed, cannot be reached, or has too few resources for the workers.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"Ray is not installed ({error}); pip install 'sametoken[ray]'") from error
    _check_address(workers.address)
    try:
        ray.init(address=workers.address or os.environ.get("RAY_ADDRESS", "auto"), logging_level="WARNING")
    except (OSError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"no Ray cluster can be reached: {reason}; start one with: ray start --head") from error
    try:
        yield _fitting(workers, ray.cluster_resources(), sum(node["Alive"] for node in ray.nodes()))
    finally:
        ray.shutdown()


def _check_address(address: str | None) -> None:
    if address is None:
        return
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        raise ConfigError(f"--address {address!r}: expected HOST:PORT of the head node, as ray start --head prints it")
    try:
        socket.create_connection((host, int(port)), REACHED_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"no Ray cluster answers at {address}: {error}; start one with: ray start --head") from error


def _fitting(workers: RayWorkers, has: Mapping[str, float], nodes: int) -> int:
    """Number of workers. Raises ConfigError if the cluster has too few CPUs or GPUs for them."""
    count = workers.number or nodes
    for name, each in (("CPU", workers.cpus), ("GPU", workers.gpus)):
        if (needed := count * each) > (found := has.get(name, 0)):
            raise ConfigError(
                f"{count} workers need {needed:g} {name}s and the cluster has {found:g}; lower --workers or "
                f"--{name.lower()}s-per-worker"
            )
    return count
