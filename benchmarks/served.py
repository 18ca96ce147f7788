"""What HTTP costs: throughput of concurrent streams and time to first token beside the bare engine; start to ready;
and what a long prompt does to streams that run. Ratios from one run.

    python benchmarks/served.py [--parts streams,start,long] [--streams 16] [--tokens 128] [--rounds 7]
                              [--threads 1,2] [--out docs/benchmarks]

The server and a bare engine with the same settings are processes of their own that take turns; the client is this
process and reads raw sockets. With `--threads 1` server and engine are pinned to the first core and the client to the
second ("apart": everything the server does beyond the engine shows), and once more the server may use both ("free").
With `--threads 2` nothing is pinned. Foreign load is logged. The long prompt needs a model with a long context: random
weights in the shape of the embedded target.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
LAST_PIECE = b"0\r\n\r\n"  # of a chunked reply
SETTINGS = {"max_batch_size": 16, "max_num_tokens": 512, "max_draft_len": 5}
FIRST_CORE, SECOND_CORE = {0}, {1}


class Process:
    """A child that answers a line for a line."""

    def __init__(self, arguments: Sequence[str], cores: set[int] | None) -> None:
        pin = (lambda: os.sched_setaffinity(0, cores)) if cores else None
        self._child = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=pin
        )  # fmt: skip

    def ask(self, **question: Any) -> Any:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        print(json.dumps(question), file=self._child.stdin, flush=True)
        return json.loads(self._child.stdout.readline())

    def close(self) -> None:
        self._child.terminate()
        self._child.wait(30)


def prompts(count: int, seed: int) -> list[list[int]]:
    """Token ids that no other round has, so that nothing is found in a cache."""
    return [[300 + (7 * i + 131 * seed + 17 * j * (i + 1)) % 3000 for j in range(24)] for i in range(count)]


def serve_engine(threads: int) -> None:
    """The bare engine: a line of settings in, the seconds it took out."""
    import torch

    from sametoken import LLM, SamplingParams

    torch.set_num_threads(threads)
    llm = LLM("embedded", "embedded-eagle3", {"max_draft_len": SETTINGS["max_draft_len"]},
              max_batch_size=SETTINGS["max_batch_size"], max_num_tokens=SETTINGS["max_num_tokens"])  # fmt: skip
    llm.generate([[0]], SamplingParams(max_tokens=2, ignore_eos=True))
    for line in sys.stdin:
        asked = json.loads(line)
        params = SamplingParams(max_tokens=asked["tokens"], ignore_eos=True)
        begin, cpu, first = time.perf_counter(), time.process_time(), 0.0
        if asked["streams"] > 1:
            llm.generate(prompts(asked["streams"], asked["seed"]), params)
        else:
            for _ in llm.stream(prompts(1, asked["seed"]), params):
                first = first or time.perf_counter() - begin
        print(json.dumps([time.perf_counter() - begin, first, time.process_time() - cpu]), flush=True)


class Wire:
    """Streams over raw sockets, kept open between requests: the cheapest client there is."""

    def __init__(self, port: int, count: int) -> None:
        self.sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
        for each in self.sockets:
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def run(self, bodies: Sequence[dict[str, Any]]) -> tuple[float, float]:
        """Seconds until all are done, and until the first event with a token."""
        waiting, first = dict(zip(self.sockets, bodies, strict=False)), 0.0
        begun: set[socket.socket] = set()
        begin = time.perf_counter()
        for each, body in waiting.items():
            each.sendall(request_bytes(body))
        with selectors.DefaultSelector() as ready:
            for each in waiting:
                ready.register(each, selectors.EVENT_READ)
            while ready.get_map():
                for key, _ in ready.select():
                    received = key.fileobj.recv(65536)
                    if key.fileobj not in begun and not received.startswith(b"HTTP/1.1 200"):
                        raise SystemExit(f"the server says {received[:400]!r}")
                    begun.add(key.fileobj)
                    if not first and b"data:" in received:
                        first = time.perf_counter() - begin
                    if received.endswith(LAST_PIECE):
                        ready.unregister(key.fileobj)
        return time.perf_counter() - begin, first

    def close(self) -> None:
        for each in self.sockets:
            each.close()


def request_bytes(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    lines = ("POST /v1/completions HTTP/1.1", "Host: here", "Content-Type: application/json",
             f"Content-Length: {len(content)}", "", "")  # fmt: skip
    return "\r\n".join(lines).encode() + content


def body_of(prompt: list[int], tokens: int, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True, **more}


@contextmanager
def server(threads: int, cores: set[int] | None, *options: str) -> Iterator[tuple[int, int, float]]:
    """A served model: its port, its process and the seconds from start to ready."""
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "sametoken.cli", "serve", *options, "--port", str(port), "--threads", str(threads),
               "--log-level", "error", "--drain-seconds", "0",
               *(f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items())]  # fmt: skip
    pin = (lambda: os.sched_setaffinity(0, cores)) if cores else None
    begin = time.perf_counter()
    child = subprocess.Popen(command, preexec_fn=pin)
    try:
        yield port, child.pid, wait_for(port, begin, child)
    finally:
        child.terminate()
        child.wait(30)


def wait_for(port: int, begin: float, child: subprocess.Popen[bytes]) -> float:
    while child.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return time.perf_counter() - begin
        except OSError:
            time.sleep(0.01)
    raise SystemExit("the server did not start")


def cpu_seconds(pid: int) -> float:
    """Of all threads of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def middle(values: Sequence[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 4), "min": round(min(values), 4), "max": round(max(values), 4)}


def compare(chosen: argparse.Namespace, threads: int, pinned: bool) -> dict[str, Any]:
    """Throughput of concurrent streams, and the first token of a lone one: the server beside the engine."""
    cores = FIRST_CORE if pinned else None
    os.sched_setaffinity(0, SECOND_CORE if pinned else FIRST_CORE | SECOND_CORE)
    engine = Process([sys.executable, str(HERE), "--serve-engine", str(threads)], cores)
    slower, later, shares, rates = [], [], [], []
    with server(threads, cores, "--draft", "embedded-eagle3") as (port, pid, _), closing(engine):
        wire = Wire(port, chosen.streams)
        for turn in range(chosen.rounds + 1):
            asked = {"streams": chosen.streams, "tokens": chosen.tokens, "seed": turn}
            bare, _, bare_cpu = engine.ask(**asked)
            before = cpu_seconds(pid)
            served, _ = wire.run([body_of(prompt, chosen.tokens) for prompt in prompts(chosen.streams, turn)])
            used = cpu_seconds(pid) - before
            firsts = [first_token(engine, wire, 1000 + 50 * turn + i) for i in range(10)]
            if turn:  # the first round warms up
                slower.append(served / bare)
                shares.append(used / bare_cpu)
                rates.append(chosen.streams * chosen.tokens / bare)
                later.append(1e3 * statistics.median(firsts))
        wire.close()
    return {
        "threads": threads, "pinned": pinned, "engine_tokens_per_second": middle(rates),
        "served_over_engine": middle(slower), "cpu_over_engine": middle(shares), "first_token_later_ms": middle(later),
    }  # fmt: skip


def first_token(engine: Process, wire: Wire, seed: int) -> float:
    """Seconds by which the first event of a lone stream comes later than the engine's first chunk."""
    _, bare, _ = engine.ask(streams=1, tokens=4, seed=seed)
    _, served = wire.run([body_of(prompts(1, seed)[0], 4)])
    return served - bare


def starts(chosen: argparse.Namespace) -> dict[str, Any]:
    os.sched_setaffinity(0, FIRST_CORE | SECOND_CORE)
    seconds = []
    for _ in range(chosen.rounds):
        with server(2, None) as (_, _, ready):
            seconds.append(ready)
    return {"start_to_ready_s": middle(seconds)}


def long_context_model(directory: Path, context: int) -> str:
    """Random weights in the shape of the embedded target, with room for a long prompt."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from sametoken import embedded

    source = embedded.target("embedded")
    config = LlamaConfig.from_pretrained(source, max_position_embeddings=context)
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    AutoTokenizer.from_pretrained(source).save_pretrained(directory)
    return str(directory)


def beside_a_long_prompt(chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """Running streams before a long prompt comes and while it is read, by the time that prompts may take."""
    os.sched_setaffinity(0, FIRST_CORE | SECOND_CORE)
    with tempfile.TemporaryDirectory() as directory:
        model = long_context_model(Path(directory), chosen.long_prompt + 512)
        # Every step's tokens in a chunk of their own: what is measured is the engine.
        options = (model, "--max-chunks-per-second", "1e9")
        return [_beside(chosen, share, options) for share in (0.4, 1.0)]


def _beside(chosen: argparse.Namespace, share: float, options: Sequence[str]) -> dict[str, Any]:
    with server(2, None, *options, "--max-prefill-share", str(share)) as (port, _, _):
        streams = Streams(port, 4)
        streams.start()
        time.sleep(5)
        begin = time.perf_counter()
        with closing(Wire(port, 1)) as wire:
            _, first = wire.run([body_of([300 + i * 31 % 3000 for i in range(chosen.long_prompt)], 2)])
        streams.stop.set()
        streams.join()
    before, during = streams.between(begin - 4, begin), streams.between(begin, begin + first)
    return {
        "max_prefill_share": share, "prompt_tokens": chosen.long_prompt, "first_token_s": round(first, 2),
        "gap_before_ms": round(1e3 * statistics.mean(before), 3),
        "mean_gap_ratio": round(statistics.mean(during) / statistics.mean(before), 2),
        "median_gap_ratio": round(statistics.median(during) / statistics.median(before), 2),
        "p99_gap_ratio": round(percentile(during, 0.99) / percentile(before, 0.99), 2),
        "longest_first_token_s": round(max(streams.firsts(begin, begin + first), default=first), 2),
    }  # fmt: skip


class Streams(threading.Thread):
    """Clients that ask again as soon as they are answered, until they are stopped; notes when something came."""

    def __init__(self, port: int, count: int) -> None:
        super().__init__(daemon=True)
        self.stop = threading.Event()
        self._wire, self._count = Wire(port, count), count
        self._seen: list[tuple[float, float, bool]] = []  # when, seconds since what came before, whether the first

    def run(self) -> None:
        seed, last = 0, [0.0] * self._count
        with selectors.DefaultSelector() as ready, closing(self._wire):
            for index, each in enumerate(self._wire.sockets):
                ready.register(each, selectors.EVENT_READ, index)
                last[index] = self._ask(each, index, seed)
            began = [False] * self._count
            while not self.stop.is_set():
                for key, _ in ready.select(0.1):
                    received, now = key.fileobj.recv(65536), time.perf_counter()
                    if b"data:" in received:
                        self._seen.append((now, now - last[key.data], not began[key.data]))
                        last[key.data], began[key.data] = now, True
                    if received.endswith(LAST_PIECE):
                        seed += 1
                        last[key.data], began[key.data] = self._ask(key.fileobj, key.data, seed), False

    def _ask(self, wire: socket.socket, index: int, seed: int) -> float:
        wire.sendall(request_bytes(body_of(prompts(self._count, seed)[index], 256)))
        return time.perf_counter()

    def between(self, begin: float, end: float) -> list[float]:
        """Seconds between tokens of a stream."""
        return [gap for at, gap, first in self._seen if begin < at < end and not first]

    def firsts(self, begin: float, end: float) -> list[float]:
        """Seconds to first tokens."""
        return [gap for at, gap, first in self._seen if begin < at < end and first]


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="streams,start,long")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--long-prompt", type=int, default=32_000)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve-engine", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve_engine is not None:
        serve_engine(chosen.serve_engine)
        return
    record: dict[str, Any] = {"machine": platform.processor() or platform.machine(), "load": os.getloadavg()}
    threads = [int(word) for word in chosen.threads.split(",")]
    parts: dict[str, Callable[[], Any]] = {
        "streams": lambda: [
            compare(chosen, count, pinned) for count in threads for pinned in (True, False) if count == 1 or not pinned
        ],
        "start": lambda: starts(chosen),
        "long": lambda: beside_a_long_prompt(chosen),
    }  # fmt: skip
    for name in chosen.parts.split(","):
        record[name] = parts[name]()
        print(json.dumps({name: record[name]}), flush=True)
    if chosen.out is not None:
        (chosen.out / "served.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
