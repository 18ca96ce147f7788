"""What latency between two hosts costs plain and speculative decoding: two ranks in network namespaces, as root.

    python benchmarks/two_hosts.py MODEL DRAFT

MODEL is the target's directory, DRAFT a draft for it. Prints a table in Markdown. Each rank computes with one thread.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "distributed"))
from two_hosts import INTERFACE, Host, kill, two_hosts  # noqa: E402

DELAYS = (0.1, 1.0, 5.0)  # ms, in each direction
TOKENS, REPEATS, LENGTH = 32, 2, 4
RANK = """
import json, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from sametoken import LLM, SamplingParams
from sametoken.speculation.params import RequestSpeculation
model, draft, interface = sys.argv[1:]
settings = {"max_draft_len": %d, "adaptive": False}
llm = LLM(model, draft, settings, dtype="bfloat16", max_seq_len=512, max_batch_size=1, tensor_parallel_size=2)
def counted():
    (line,) = (each for each in Path("/proc/net/dev").read_text().splitlines() if each.strip().startswith(interface))
    numbers = line.partition(":")[2].split()
    return int(numbers[8]), int(numbers[0])
prompt = llm.render_chat([{"role": "user", "content": "Once upon a time"}])
print(json.dumps([llm.config.num_layers, llm.config.hidden_size, len(prompt)]), flush=True)
def measured(speculative):
    before = counted()
    params = SamplingParams(max_tokens=%d, temperature=0, ignore_eos=True, speculative=speculative)
    (done,) = llm.generate([prompt], params)
    sent, received = (new - old for new, old in zip(counted(), before))
    return [done.seconds, sent, received, done.speculation.acceptance_length, done.token_ids]
for line in sys.stdin:
    print(json.dumps([measured(RequestSpeculation(enabled=False)), measured(None)]), flush=True)
""" % (LENGTH, TOKENS)  # fmt: skip


class Ranks:
    """Two ranks that measure when they are asked."""

    def __init__(self, hosts: tuple[Host, Host], model: str, draft: str, interface: str) -> None:
        meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29500"}
        meeting["LOCAL_WORLD_SIZE"] = str(len({host.name for host in hosts}) % 2 + 1)
        command = ["taskset", "-c", "0", "sametoken-python", "-c", RANK, model, draft, interface]
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


def row(name: str, plain: list[float], drafted: list[float]) -> str:
    speeds = [TOKENS / each[0] for each in (plain, drafted)]
    return f"| {name} | {speeds[0]:.2f} | {speeds[1]:.2f} | {speeds[1] / speeds[0]:.2f} |"


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
        for delay in DELAYS:
            try:
                for host in hosts:
                    host.root(f"tc qdisc replace dev {INTERFACE} root netem delay {delay}ms limit 100000")
            except subprocess.CalledProcessError:
                print(f"\n{delay:g} ms and more: this kernel has no netem (module sch_netem)")
                break
            print(row(f"two, {delay:g} ms", *ranks.measure()), flush=True)
        ranks.end()
    layers, hidden, prompt = ranks.shape
    rows = prompt + TOKENS - 1
    print(
        f"\nbytes sent by rank 0 for each of {rows} rows, plain: {plain[1] / rows:.0f}, received: {plain[2] / rows:.0f}"
    )
    print(f"by the formula: {2 * layers * hidden * 4}; tokens per forward with drafts: {drafted[3]:.2f}")


if __name__ == "__main__":
    main()
