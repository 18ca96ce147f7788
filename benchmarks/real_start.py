"""How soon servers of a published file are ready, and how much memory they take: ours beside llama.cpp's, in turns.

    python benchmarks/real_start.py --target FILE.gguf --draft FILE.gguf [--llama-server PROGRAM] [--rounds 3]

Every server is started with its models and nothing else. Ours finds no packed weights of a model at first ("first";
with a draft, none of the draft), and later those that the start before left. A request of 24 tokens follows. Memory is
that of the process, mapped files included: idle once the start's work has ended, and the most until the request ended.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from real_pair import CODE, server, visit

CACHE_VARIABLE = "SAMETOKEN_WEIGHT_CACHE"
TOKENS = 24
SETTLE_S = 1.0  # an idle process uses less than BUSY of it
BUSY = 0.05


def memory(process: int, name: str) -> float:
    """GB of a process by a name of /proc/PID/status."""
    status = Path(f"/proc/{process}/status").read_text()
    return next(int(line.split()[1]) * 1024 / 1e9 for line in status.splitlines() if line.startswith(name))


def work(process: int) -> float:
    """Seconds of processor time of a process, with children that ended."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def settle(process: int) -> None:
    """Wait until a process is idle: a first start still measures what drafts cost, and writes packed weights."""
    before = -math.inf
    while (now := work(process)) - before > BUSY * SETTLE_S:
        before = now
        time.sleep(SETTLE_S)


def start(name: str, command: list[str], log: Path) -> dict[str, float]:
    """Figures of one start."""
    asked = {"messages": [{"role": "user", "content": CODE + "def add(a, b):\n"}], "max_tokens": TOKENS}
    asked |= {"temperature": 0, "stream_options": {"include_usage": True}}
    with server(name, command, log) as running:
        spent = work(running.process.pid)
        running.go_on()
        settle(running.process.pid)
        idle = memory(running.process.pid, "VmRSS")
        asyncio.run(visit(running.url, [asked], 1))
        most = memory(running.process.pid, "VmHWM")
        running.process.terminate()
        running.process.wait()  # it may still write packed weights
        return {"ready": running.seconds, "work": spent, "idle": idle, "most": most}


def generate(target: str) -> dict[str, float]:
    """Seconds of `sametoken generate`."""
    words = [sys.executable, "-m", "sametoken.cli", "generate", target, "--chat", "--prompt", "Write a haiku."]
    begin, before = time.perf_counter(), os.times()
    subprocess.run([*words, "--max-tokens", str(TOKENS)], check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return {"ready": time.perf_counter() - begin, "work": spent}


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})" if values else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--llama-server")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("real_start.json"), help="record; logs lie beside it")
    chosen = parser.parse_args()
    ours = [sys.executable, "-m", "sametoken.cli", "serve", chosen.target]
    commands = {"sametoken first": ours, "sametoken later": ours,
                "sametoken draft first": [*ours, "--draft", chosen.draft],
                "sametoken draft later": [*ours, "--draft", chosen.draft]}  # fmt: skip
    if chosen.llama_server:
        theirs = [chosen.llama_server, "-m", chosen.target]
        commands |= {"llama.cpp": theirs, "llama.cpp draft": [*theirs, "-md", chosen.draft]}
    found: dict[str, list[dict[str, float]]] = {}
    for turn in range(chosen.rounds):
        with tempfile.TemporaryDirectory() as kept:
            os.environ[CACHE_VARIABLE] = kept
            for name, command in commands.items():
                log = chosen.out.with_suffix(f".{name.replace(' ', '-')}.log")
                found.setdefault(name, []).append(start(name, command, log))
                print(f"round {turn}: {name}: {found[name][-1]}, load {os.getloadavg()[0]:.1f}", flush=True)
            found.setdefault("sametoken generate", []).append(generate(chosen.target))
    record = {"command": sys.argv, "machine": platform.processor() or platform.machine(), "starts": found}
    chosen.out.write_text(json.dumps(record, indent=1) + "\n")
    columns = {"ready": "s until ready", "work": "s of processor time", "idle": "GB idle", "most": "GB at most"}
    print(f"| command | {' | '.join(columns.values())} |", f"|{'---|' * 5}", sep="\n")
    for name, starts in found.items():
        cells = [spread([each[key] for each in starts if key in each]) for key in columns]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
