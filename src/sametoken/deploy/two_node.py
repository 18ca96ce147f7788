"""One model on two hosts, from the checks of both over mpirun and a first chat to the end."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sametoken.deploy.host import HostFacts, HostQuery
from sametoken.errors import ConfigError, SametokenError

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
FORWARDED = ("HF_", "NCCL_", "GLOO_", "UCX_", "TORCH_", "SAMETOKEN_", "OMP_NUM_THREADS", "PYTHONPATH", "PATH")
CHECK_S, READY_S, DRAIN_S = 600.0, 3600.0, 40.0  # a check may download the model; loading may take long
CHAT = {"messages": [{"role": "user", "content": "Paris is great because"}], "max_tokens": 64}


@dataclass(frozen=True)
class Deployment:
    """A model on two hosts.

    Attributes:
        hosts: their addresses; the first is this machine, where rank 0 runs.
        interface: that joins them, None for the one that leads to the first host.
        serve: the words of `sametoken serve` after its name, the number of ranks not among them.
        needed: bytes of weights on each host.
        port: where the server listens. meeting: where the ranks meet.
        key: of the server, None where it asks for none.
    """

    hosts: tuple[str, str]
    interface: str | None
    model: str
    revision: str | None
    serve: tuple[str, ...]
    needed: int
    port: int
    meeting: int
    key: str | None

    @property
    def environment(self) -> dict[str, str]:
        """The variables that go to both hosts."""
        found = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
        found |= {"MASTER_ADDR": self.hosts[0], "MASTER_PORT": str(self.meeting)}
        return found | ({} if self.interface is None else {"GLOO_SOCKET_IFNAME": self.interface})

    @property
    def url(self) -> str:
        return f"http://{self.hosts[0]}:{self.port}"

    def question(self, rank: int) -> HostQuery:
        """What is asked of a host before anything starts there."""
        return HostQuery(self.model, self.revision, [self.port, self.meeting] if rank == 0 else [], self.environment)

    def check(self, rank: int) -> list[str]:
        """The command that asks a host; the question goes to its standard input."""
        examine = [sys.executable, "-m", "sametoken.deploy.host"]
        if rank == 0:
            return examine
        path = os.environ.get("PYTHONPATH")
        return [*SSH, self.hosts[rank], shlex.join([*(["env", f"PYTHONPATH={path}"] if path else []), *examine])]

    def launch(self, hostfile: str) -> list[str]:
        """The command that starts both ranks; values of variables stay off the command line."""
        forwarded = [part for name in sorted(self.environment) for part in ("-x", name)]
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        network = ["--mca", "oob_tcp_if_include", self.interface] if self.interface else []
        return [
            "mpirun", *root, "--hostfile", hostfile, "-np", "2", "--map-by", "ppr:1:node", "--bind-to", "none",
            "--mca", "plm_rsh_args", shlex.join(SSH[1:]), *network, *forwarded,
            sys.executable, "-m", "sametoken.cli", "serve", *self.serve, "--tp-size", "2",
        ]  # fmt: skip

    @property
    def hostfile(self) -> str:
        """The contents of mpirun's hostfile."""
        return "".join(f"{host} slots=1\n" for host in self.hosts)

    def commands(self) -> list[str]:
        """Every command, as a user would type it."""
        file = "hostfile"
        key = ' -H "Authorization: Bearer $SAMETOKEN_API_KEY"' if self.key else ""
        return [
            *(f"{shlex.join(self.check(rank))} < question.json" for rank in (0, 1)),
            f"printf {shlex.quote(self.hostfile)} > {file}".replace("\n", "\\n"),
            " ".join([f"MASTER_ADDR={self.hosts[0]}", f"MASTER_PORT={self.meeting}", shlex.join(self.launch(file))]),
            f"curl {self.url}/health",
            f"curl {self.url}/v1/chat/completions{key} -H 'Content-Type: application/json' "
            f"-d {shlex.quote(json.dumps(CHAT))}",
            f"rm {file}",
        ]


def deploy(plan: Deployment, tell: Callable[[str], object]) -> int:
    """Checks both hosts, starts the ranks, asks for a first chat, and waits; returns the exit code of mpirun.

    Raises:
        ConfigError: a host cannot be used as it is. SametokenError: the ranks ended before the server answered.
    """
    check_hosts(plan, [asked(plan, rank) for rank in (0, 1)])
    tell(f"{' and '.join(plan.hosts)}: same versions, same files, enough memory for {plan.needed / 1e9:.2f} GB each")
    with tempfile.TemporaryDirectory(prefix="sametoken-") as folder:
        file = Path(folder) / "hostfile"
        file.write_text(plan.hostfile)
        job = subprocess.Popen(plan.launch(str(file)), env={**os.environ, **plan.environment}, start_new_session=True)
        stop = _Stop(job)
        try:
            _wait_for(plan, job)
            answer = _post(plan, CHAT)
            tell(f"{plan.url} answers: {answer['choices'][0]['message']['content']!r}")
            return job.wait()
        finally:
            stop.end()


def asked(plan: Deployment, rank: int) -> HostFacts:
    """What a host says of itself. Raises ConfigError if it does not answer."""
    host, command = plan.hosts[rank], plan.check(rank)
    try:
        done = subprocess.run(
            command, input=json.dumps(plan.question(rank)), text=True, capture_output=True, timeout=CHECK_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{host} cannot be asked: {error}; check that ssh is installed and {host} answers") from error
    if done.returncode == 255 and rank:
        raise ConfigError(
            f"ssh {host} failed: {done.stderr.strip() or 'no reason given'}; expected a login without password: "
            f"ssh-copy-id {host}, then try ssh {host} true"
        )
    if done.returncode:
        raise ConfigError(
            f"{host} does not run {sys.executable} -m sametoken.deploy.host: {done.stderr.strip()[-300:]}; install the "
            "same version of sametoken at the same place on both hosts"
        )
    return HostFacts(*json.loads(done.stdout.strip().splitlines()[-1]))


def check_hosts(plan: Deployment, found: Sequence[HostFacts]) -> None:
    """Refuses hosts that could not serve the model together. Raises ConfigError with the first reason."""
    for host, each in zip(plan.hosts, found, strict=True):
        if each.problem:
            raise ConfigError(f"{host} has no usable {plan.model}: {each.problem}")
        if plan.interface is not None and plan.interface not in each.interfaces:
            raise ConfigError(f"{host} has no interface {plan.interface}; expected one of {', '.join(each.interfaces)}")
        if each.taken:
            raise ConfigError(f"port {each.taken[0]} of {host} is taken; choose another --port or MASTER_PORT")
        if each.free < plan.needed:
            raise ConfigError(
                f"{host} has {each.free / 1e9:.2f} GB of memory free, and the weights of {plan.model} take "
                f"{plan.needed / 1e9:.2f} GB on each host; see sametoken doctor {plan.model}"
            )
    first, second = found
    for name, value in first.facts.items():
        if second.facts.get(name) != value:
            raise ConfigError(
                f"{plan.hosts[1]} has {name} {second.facts.get(name)} and {plan.hosts[0]} has {value}; install the same"
            )
    if first.digest != second.digest:
        raise ConfigError(
            f"{plan.model} has other files on {plan.hosts[1]} than on {plan.hosts[0]}; copy the same checkpoint to both"
        )


def is_own(address: str) -> bool:
    """Whether an address is one of this machine."""
    try:
        with socket.create_server((socket.gethostbyname(address), 0)):
            return True
    except OSError:
        return False


class _Stop:
    """Answers SIGINT and SIGTERM: rank 0 finishes open requests and the others end with it."""

    def __init__(self, job: subprocess.Popen[bytes]) -> None:
        self._job = job
        self._before = {number: signal.signal(number, self._drain) for number in (signal.SIGINT, signal.SIGTERM)}

    def _drain(self, number: int, frame: Any) -> None:
        """mpirun would kill the ranks a second after its own SIGTERM, so rank 0 gets one itself."""
        for rank in _ranks_of(self._job.pid):
            os.kill(rank, signal.SIGTERM)

    def end(self) -> None:
        """Ends what still runs."""
        self._drain(0, None)
        try:
            self._job.wait(DRAIN_S)
        except subprocess.TimeoutExpired:
            self._job.terminate()
            self._job.wait()
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _ranks_of(mpirun: int) -> list[int]:
    """The processes of `sametoken serve` that mpirun started on this host."""
    found = []
    for children in Path("/proc").glob(f"{mpirun}/task/*/children"):
        for child in children.read_text().split():
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            if b"sametoken.cli" in words:
                found.append(int(child))
    return found


def _wait_for(plan: Deployment, job: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + READY_S
    while time.monotonic() < end:
        if (code := job.poll()) is not None:
            raise SametokenError(f"mpirun ended with exit code {code} before the server answered; its output says why")
        try:
            with urllib.request.urlopen(f"{plan.url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.3)
    raise SametokenError(f"{plan.url}/health did not answer within {READY_S:g} s")


def _post(plan: Deployment, body: Mapping[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {plan.key}"} if plan.key else {})
    request = urllib.request.Request(f"{plan.url}/v1/chat/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise SametokenError(f"{plan.url} refused the first chat: {error.read().decode(errors='replace')}") from error
