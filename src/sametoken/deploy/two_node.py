"""One model on two hosts: checks of both hosts, start of the ranks by mpirun, a first chat, and shutdown."""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path

from sametoken.deploy.host import HostFacts, HostQuery
from sametoken.deploy.start import DIRECT, noted_signals, wait_for
from sametoken.deploy.templates import render
from sametoken.errors import ConfigError, SametokenError
from sametoken.parallel.meeting import KEY as RANK_KEY

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
FORWARDED = ("HF_", "NCCL_", "GLOO_", "UCX_", "TORCH_", "SAMETOKEN_", "OMP_NUM_THREADS", "PYTHONPATH", "PATH")
PLACES = ("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE")  # variables of a printed query; none is secret
KEYS_VARIABLE = "SAMETOKEN_API_KEY"
# Time limits in seconds: check of a host, which may download the model; loading; first chat; end of mpirun.
CHECK_S, READY_S, CHAT_S, END_S = 600.0, 3600.0, 300.0, 10.0
CHAT = {"messages": [{"role": "user", "content": "Paris is great because"}], "max_tokens": 64}


@dataclass(frozen=True)
class Deployment:
    """Model on two hosts.

    Attributes:
        hosts: addresses of the hosts; the first is this machine, with rank 0.
        interface: network interface between the hosts; None selects the one with the route to the first host.
        model: directory or Hub id of the target.
        revision: revision on the Hub.
        serve: arguments of `sametoken serve`, without the number of ranks.
        needed: bytes of weights on each host.
        address: address of the server for requests.
        port: port of the server.
        meeting: port at which the ranks connect.
        keys: API keys of the server; () if it requires none.
        drain: time limit of open requests after a signal, in seconds.
        rank_key: key that authenticates the ranks: from the environment, or a new one.
    """

    hosts: tuple[str, str]
    interface: str | None
    model: str
    revision: str | None
    serve: tuple[str, ...]
    needed: int
    address: str
    port: int
    meeting: int
    keys: tuple[str, ...]
    drain: float
    rank_key: str = field(default_factory=lambda: os.environ.get(RANK_KEY) or secrets.token_hex(16), repr=False)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that are forwarded to both hosts."""
        found = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
        keys = {KEYS_VARIABLE: ",".join(self.keys)} if self.keys else {}
        return found | self.stated | keys | {RANK_KEY: self.rank_key}

    @property
    def stated(self) -> dict[str, str]:
        """Variables that the deployment sets, without secrets."""
        stated = {"MASTER_ADDR": self.hosts[0], "MASTER_PORT": str(self.meeting)}
        return stated | ({} if self.interface is None else {"GLOO_SOCKET_IFNAME": self.interface})

    @property
    def url(self) -> str:
        return f"http://{f'[{self.address}]' if ':' in self.address else self.address}:{self.port}"

    def question(self, rank: int) -> HostQuery:
        """Query to a host before anything starts there."""
        return HostQuery(self.model, self.revision, [self.port, self.meeting] if rank == 0 else [], self.environment)

    def check(self, rank: int) -> list[str]:
        """Command that examines a host; its standard input is the query."""
        examine = [sys.executable, "-m", "sametoken.deploy.host"]
        if rank == 0:
            return examine
        path = os.environ.get("PYTHONPATH")
        return [*SSH, self.hosts[rank], shlex.join([*(["env", f"PYTHONPATH={path}"] if path else []), *examine])]

    def launch(self, hostfile: str) -> list[str]:
        """Command that starts both ranks, without values of environment variables."""
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
        """Contents of mpirun's hostfile."""
        return "".join(f"{host} slots=1\n" for host in self.hosts)

    def commands(self) -> list[str]:
        """Lines of a script with all commands, without values of variables other than `PLACES`."""
        places = {name: value for name, value in self.environment.items() if name in PLACES}
        asked = [(json.dumps(self.question(rank)._replace(environment=places)), self.check(rank)) for rank in (0, 1)]
        values = {
            "asked": asked,
            "hostfile": self.hostfile,
            "stated": self.stated.items(),
            "launch": self.launch("hostfile"),
            "url": self.url,
            "key": KEYS_VARIABLE if self.keys else None,
            "chat": json.dumps(CHAT),
        }
        return render("two_node.sh", values).splitlines()


def deploy(plan: Deployment, tell: Callable[[str], object]) -> int:
    """Check both hosts, start the ranks, send a first chat, and wait for the end.

    Returns:
        Exit code of mpirun; 128 plus the number of a signal that ended mpirun or came before the server was ready.

    Raises:
        ConfigError: a host does not pass its checks.
        SametokenError: the ranks ended before the server was ready.
    """
    check_hosts(plan, [asked(plan, rank) for rank in (0, 1)])
    tell(f"{' and '.join(plan.hosts)}: same versions, same files, enough memory for {plan.needed / 1e9:.2f} GB each")
    serving: list[subprocess.Popen[bytes]] = []  # mpirun, after the server is ready

    def finish() -> None:
        """Send SIGUSR1, which mpirun forwards: the first one drains requests, the second ends them.

        After SIGTERM mpirun would kill the ranks.
        """
        for job in serving:
            job.send_signal(signal.SIGUSR1)

    with tempfile.TemporaryDirectory(prefix="sametoken-") as folder, noted_signals(finish) as signals:
        file = Path(folder) / "hostfile"
        file.write_text(plan.hostfile)
        job = subprocess.Popen(plan.launch(str(file)), env={**os.environ, **plan.environment}, start_new_session=True)
        try:
            health, hint = f"{plan.url}/health", "; see its output"
            if wait_for(job, "mpirun", health, READY_S, lambda: bool(signals), lambda: hint):
                serving.append(job)
                _first_chat(plan, signals, tell)
            while job.poll() is None and not signals:
                time.sleep(0.1)
        finally:
            _end(job, plan.drain if serving and signals else 0.0)
        return job.returncode if serving and job.returncode >= 0 else 128 + next(iter(signals), -job.returncode)


def asked(plan: Deployment, rank: int) -> HostFacts:
    """Facts of the host of a rank. Raises ConfigError if the host cannot be examined."""
    host, command = plan.hosts[rank], plan.check(rank)
    try:
        done = subprocess.run(
            command, input=json.dumps(plan.question(rank)), text=True, capture_output=True, timeout=CHECK_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"{host} cannot be examined: {error}; check that ssh is installed and {host} is reachable"
        ) from error
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
    """Raise ConfigError with the first reason for which the hosts cannot serve the model together."""
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


def is_loopback(address: str) -> bool:
    """True if only this machine can reach the address."""
    return ipaddress.ip_address(socket.gethostbyname(address)).is_loopback


def is_own(address: str) -> bool:
    """True if the address belongs to this machine."""
    try:
        with socket.create_server((socket.gethostbyname(address), 0)):
            return True
    except OSError:
        return False


def _end(job: subprocess.Popen[bytes], drain: float) -> None:
    """Terminate mpirun, and with it the ranks, unless mpirun ends within `drain` seconds."""
    with suppress(subprocess.TimeoutExpired):
        job.wait(drain)
    if job.poll() is None:
        job.terminate()
    try:
        job.wait(END_S)
    except subprocess.TimeoutExpired:
        job.kill()
        job.wait()


def _first_chat(plan: Deployment, signals: Sequence[int], tell: Callable[[str], object]) -> None:
    """Print the server's answer to a first chat, or the reason for none.

    A refused chat does not end the deployment: the server may be able to serve other requests.

    Raises:
        SametokenError: the server failed.
    """
    url = f"{plan.url}/v1/chat/completions"
    key = {"Authorization": f"Bearer {plan.keys[0]}"} if plan.keys else {}
    request = urllib.request.Request(url, json.dumps(CHAT).encode(), {"Content-Type": "application/json"} | key)
    try:
        with DIRECT.open(request, timeout=CHAT_S) as answer:
            text = json.load(answer)["choices"][0]["message"]["content"]
        said = f"{plan.url} answers: {text!r}"
    except urllib.error.HTTPError as error:
        refusal = f"{url} refused the first chat ({error.code}): {error.read().decode(errors='replace')}"
        if error.code >= 500 and not signals:
            raise SametokenError(refusal) from error
        said = f"{refusal}; the server goes on"
    except (OSError, HTTPException) as error:
        if signals:
            return
        if not isinstance(getattr(error, "reason", error), TimeoutError):
            raise SametokenError(f"{url} broke off the first chat: {error}; see the output of the ranks") from error
        said = f"{url} did not answer the first chat within {CHAT_S:g} s; the server goes on"
    tell(said)
