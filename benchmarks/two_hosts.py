"""What latency between two hosts costs plain and speculative decoding: two ranks in network namespaces, as root.

    python benchmarks/two_hosts.py MODEL DRAFT

MODEL is the target's directory, DRAFT a draft for it. Prints a table in Markdown. Each rank computes with one thread.
Delay is the kernel's (tc netem); where it has none, a forwarder in user space delays each packet (delayed_link.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "distributed"))
from two_hosts import INTERFACE, SSH_PORT, Host, kill, two_hosts  # noqa: E402

DELAYS = (0.1, 1.0, 5.0)  # ms, in each direction
MTU = 9000  # of the forwarder's devices
TOKENS, REPEATS, LENGTH = 32, 2, 4
RANK = """
import json, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from sametoken import LLM, SamplingParams
from sametoken.options.sampling import RequestSpeculation
model, draft, interface, length, tokens = sys.argv[1:]
settings = {"max_draft_len": int(length), "adaptive": False}
llm = LLM(model, draft, settings, dtype="bfloat16", max_seq_len=512, max_batch_size=1, tensor_parallel_size=2)
def counted():
    (line,) = (each for each in Path("/proc/net/dev").read_text().splitlines() if each.strip().startswith(interface))
    numbers = line.partition(":")[2].split()
    return int(numbers[8]), int(numbers[0])
prompt = llm.render_chat([{"role": "user", "content": "Once upon a time"}])
print(json.dumps([llm.config.num_layers, llm.config.hidden_size, len(prompt)]), flush=True)
def measured(speculative):
    before = counted()
    params = SamplingParams(max_tokens=int(tokens), temperature=0, ignore_eos=True, speculative=speculative)
    (done,) = llm.generate([prompt], params)
    sent, received = (new - old for new, old in zip(counted(), before))
    return [done.seconds, sent, received, done.speculation.acceptance_length, done.token_ids]
for line in sys.stdin:
    print(json.dumps([measured(RequestSpeculation(enabled=False)), measured(None)]), flush=True)
"""


CONNECT = """
import socket, statistics, sys, time
found = []
for _ in range(21):
    begin = time.perf_counter()
    socket.create_connection((sys.argv[1], int(sys.argv[2]))).close()
    found.append(1e3 * (time.perf_counter() - begin))
print(statistics.median(found))
"""


class Ranks:
    """Two ranks that measure when they are asked."""

    def __init__(self, hosts: tuple[Host, Host], model: str, draft: str, interface: str) -> None:
        meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29500"}
        meeting["LOCAL_WORLD_SIZE"] = str(len({host.name for host in hosts}) % 2 + 1)
        command = [
            "taskset",
            "-c",
            "0",
            "sametoken-python",
            "-c",
            RANK,
            model,
            draft,
            interface,
            str(LENGTH),
            str(TOKENS),
        ]
        second = [*command[:2], "1", *command[3:]]
        streams = {"stdin": subprocess.PIPE, "stderr": None}
        self.processes = [
            host.start(*each, environment={"RANK": str(rank), **meeting}, **streams)
            for rank, (host, each) in enumerate(zip(hosts, (command, second), strict=True))
        ]
        self.shape = json.loads(self._line())

    def _line(self) -> str:
        assert self.processes[0].stdout is not None
        return self.processes[0].stdout.readline()

    def measure(self) -> list[list[float]]:
        """The faster of some runs: seconds, bytes sent, received, acceptance length and tokens; plain, then drafted."""
        found = []
        for _ in range(REPEATS):
            assert self.processes[0].stdin is not None
            self.processes[0].stdin.write("go\n")
            self.processes[0].stdin.flush()
            found.append(json.loads(self._line()))
        assert all(each[4] == found[0][0][4] for pair in found for each in pair), "tokens differ"
        return [min((pair[way] for pair in found), key=lambda run: run[0]) for way in (0, 1)]

    def end(self) -> None:
        for process in self.processes:
            kill(process)


SetDelay = Callable[[float], object]  # ms, in each direction


def netem(hosts: tuple[Host, Host], delay: float) -> None:
    """Lets the kernel delay what both hosts send. Raises CalledProcessError where it cannot."""
    for host in hosts:
        host.root(f"tc qdisc replace dev {INTERFACE} root netem delay {delay}ms limit 100000 2> /dev/null")


@contextmanager
def forwarder(hosts: tuple[Host, Host]) -> Iterator[SetDelay]:
    """Joins the hosts by a forwarder in place of their cable; the value sets its delay."""
    hosts[0].root(f"ip link del {INTERFACE}")
    command = [sys.executable, str(ROOT / "benchmarks" / "delayed_link.py"), *(str(host.first) for host in hosts)]
    process = subprocess.Popen([*command, INTERFACE], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None

    def delayed(delay: float) -> None:
        process.stdin.write(f"{delay}\n")
        process.stdin.flush()
        assert process.stdout.readline() == "set\n"

    try:
        assert process.stdout.readline() == "made\n"
        for host in hosts:
            host.root(f"ip addr add {host.address}/24 dev {INTERFACE}; ip link set {INTERFACE} mtu {MTU} up")
        yield delayed
    finally:
        process.stdin.close()
        process.wait(10)


def round_trip(hosts: tuple[Host, Host]) -> float:
    """Milliseconds of a packet there and back, which opening a connection takes: the median of some."""
    found = hosts[0].run(sys.executable, "-c", CONNECT, hosts[1].address, str(SSH_PORT))
    return float(found.stdout)


def row(name: str, plain: list[float], drafted: list[float]) -> str:
    speeds = [TOKENS / each[0] for each in (plain, drafted)]
    return f"| {name} | {speeds[0]:.2f} | {speeds[1]:.2f} | {speeds[1] / speeds[0]:.2f} |"


def compare(hosts: tuple[Host, Host], ranks: Ranks, delays: tuple[float, ...], delayed: SetDelay, by: str) -> None:
    """Prints a row of the table for each delay."""
    for delay in delays:
        delayed(delay)
        name = f"two, {delay:g} ms by {by}, round trip {round_trip(hosts):.2f} ms"
        print(row(name, *ranks.measure()), flush=True)


def main() -> None:
    model, draft = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder, two_hosts(Path(folder)) as hosts:
        print("| hosts | plain, tokens/s | drafts of 4, tokens/s | gain |\n|---|---|---|---|")
        ranks = Ranks((hosts[0], hosts[0]), model, draft, "lo")
        print(row("one, both ranks", *ranks.measure()), flush=True)
        ranks.end()
        ranks = Ranks(hosts, model, draft, INTERFACE)
        plain, drafted = ranks.measure()
        print(row("two, no delay added", plain, drafted), flush=True)
        try:
            netem(hosts, DELAYS[0])
        except subprocess.CalledProcessError:
            ranks.end()
            with forwarder(hosts) as delayed:
                ranks = Ranks(hosts, model, draft, INTERFACE)
                compare(hosts, ranks, (0.0, *DELAYS), delayed, "a forwarder in user space")
                ranks.end()
        else:
            compare(hosts, ranks, DELAYS, lambda delay: netem(hosts, delay), "the kernel")
            ranks.end()
    layers, hidden, prompt = ranks.shape
    rows = prompt + TOKENS - 1
    print(
        f"\nbytes sent by rank 0 for each of {rows} rows, plain: {plain[1] / rows:.0f}, received: {plain[2] / rows:.0f}"
    )
    print(f"by the formula: {2 * layers * hidden * 4}; tokens per forward with drafts: {drafted[3]:.2f}")


if __name__ == "__main__":
    main()
