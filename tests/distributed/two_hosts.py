"""Two hosts on one machine: namespaces of Linux with an address, a host name, processes and an SSH server each.

Only root may make them. Nothing of a host outlives its first process: network, mounts and processes go with it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

INTERFACE = "enp1s0f1np1"  # as the document of the two machines names it
SSH_PORT = 2233
PROGRAMS = ("sshd", "ssh-keygen", "mpirun", "unshare", "nsenter", "ip")
SSHD = """\
Port {port}
HostKey {keys}/host
AuthorizedKeysFile {keys}/user.pub
StrictModes no
UsePAM no
PermitRootLogin yes
PidFile none
SetEnv PATH={programs}:/usr/local/bin:/usr/bin:/bin OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
"""
SSH = """\
Host *
  Port {port}
  IdentityFile {keys}/user
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""


def missing() -> str:
    """Why hosts cannot be made here, "" if they can."""
    if os.geteuid() != 0:
        return "two hosts are namespaces of Linux, which only root may make; run make test-distributed as root"
    absent = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]
    return f"missing programs: {', '.join(absent)}; make test-distributed installs them" if absent else ""


@dataclass
class Host:
    """One of them.

    Attributes:
        folder: what only this host has: `bin/sametoken` is its installation.
        first: the process whose namespaces are the host.
    """

    name: str
    address: str
    folder: Path
    first: int = 0
    environment: dict[str, str] = field(default_factory=dict)

    def start(
        self, *command: str, environment: Mapping[str, str] = {}, cwd: Path | None = None, **options: object
    ) -> subprocess.Popen[str]:
        """A process of this host, as a user at its keyboard starts it, whatever signals the tests themselves ignore."""
        place = ["nsenter", "-t", str(self.first), "-n", "-u", "-m", "-p", f"--wd={cwd or self.folder}"]
        enter = ["env", "--default-signal=HUP,INT", *place, *command]
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        own = {"PATH": f"{self.folder}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "LANG": "C.UTF-8"}
        return subprocess.Popen(enter, text=True, env={**own, **self.environment, **environment}, **streams)  # type: ignore[call-overload, no-any-return]

    def run(self, *command: str, seconds: float = 90.0, **options: object) -> subprocess.CompletedProcess[str]:
        """The same to its end; what runs longer than `seconds` is an error."""
        process = self.start(*command, **options)  # type: ignore[arg-type]
        try:
            out, err = process.communicate(timeout=seconds)
        finally:
            kill(process)
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def processes(self, word: str) -> list[int]:
        """Processes of this host, by their numbers outside, whose command has a word."""
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            try:
                here = os.readlink(place / "ns/pid") == os.readlink(f"/proc/{self.first}/ns/pid")
                if here and word in (place / "cmdline").read_bytes().decode(errors="replace").replace("\0", " "):
                    found.append(int(place.name))
            except OSError:  # it has ended
                continue
        return found

    def root(self, command: str) -> None:
        """Runs a line of shell in this host, which must go well."""
        subprocess.run(["nsenter", "-t", str(self.first), "-n", "-u", "-m", "-p", "sh", "-ec", command], check=True)


def inner(process: subprocess.Popen[str]) -> int:
    """The process that `Host.start` started, behind nsenter."""
    end = time.monotonic() + 5
    while time.monotonic() < end:
        found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        if found:
            return int(found[0])
        time.sleep(0.01)
    raise TimeoutError("nsenter started nothing")


def kill(process: subprocess.Popen[str]) -> None:
    """Ends a process of a host, if it has not ended, and closes its streams."""
    if process.poll() is None:
        os.kill(inner(process), signal.SIGKILL)
        process.wait(10)
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def _installation(folder: Path) -> None:
    """`sametoken` as a command: this checkout, by the interpreter of the tests."""
    (folder / "bin").mkdir(parents=True)
    sources = Path(__file__).parents[2] / "src"
    for name, module in (
        ("sametoken", "sametoken.cli"),
        ("torchrun", "torch.distributed.run"),
        ("sametoken-python", ""),
    ):
        call = f'-m {module} "$@"' if module else '"$@"'
        program = folder / "bin" / name
        program.write_text(f"#!/bin/sh\nexport PYTHONPATH={folder}/packages:{sources}\nexec {sys.executable} {call}\n")
        program.chmod(0o755)


@contextmanager
def _host(name: str, address: str, folder: Path, keys: Path) -> Iterator[Host]:
    _installation(folder)
    etc = folder / "ssh"
    etc.mkdir()
    (etc / "sshd_config").write_text(SSHD.format(port=SSH_PORT, keys=keys, programs=folder / "bin"))
    (etc / "ssh_config").write_text(SSH.format(port=SSH_PORT, keys=keys))
    begin = (
        f"hostname {name} && ip link set lo up && mount --bind {etc} /etc/ssh && mount -t tmpfs tmpfs /run && "
        f"mkdir /run/sshd && exec {shutil.which('sshd', path='/usr/sbin:/sbin:/usr/bin')} -D"
    )
    spaces = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
    process = subprocess.Popen([*spaces, "sh", "-ec", begin], text=True, stdin=subprocess.DEVNULL)
    try:
        yield Host(name, address, folder, inner(process))
    finally:
        process.kill()  # and with it the first process of the host, which ends all others
        process.wait(10)


@contextmanager
def two_hosts(root: Path) -> Iterator[tuple[Host, Host]]:
    """Spark A and Spark B with the addresses of the document, joined by one cable."""
    keys = root / "keys"
    keys.mkdir()
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", keys / name], check=True)
    with (
        _host("spark-a", "192.168.200.12", root / "a", keys) as first,
        _host("spark-b", "192.168.200.13", root / "b", keys) as second,
    ):
        ends = [["name", INTERFACE, "netns", str(host.first)] for host in (first, second)]
        subprocess.run(["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]], check=True)
        for host in (first, second):
            host.root(f"ip addr add {host.address}/24 dev {INTERFACE}; ip link set {INTERFACE} up")
        _reachable(first, second)
        yield first, second


def _reachable(first: Host, second: Host) -> None:
    """Waits for both SSH servers."""
    for here, there in ((first, second), (second, first)):
        for _ in range(50):
            if here.run("ssh", there.address, "hostname").stdout == f"{there.name}\n":
                break
            time.sleep(0.1)
        else:
            raise TimeoutError(f"{here.name} does not reach {there.name}")


def hostfile(hosts: Sequence[Host]) -> Path:
    """The hostfile of the document, on the first host."""
    place = hosts[0].folder / "openmpi-hostfile"
    place.write_text("".join(f"{host.address}\n" for host in hosts))
    return place
