"""Servers of a published target and draft, side by side: ours, llama.cpp's, vLLM's and transformers'.

    python scripts/real_models.py DIR
    python benchmarks/real_pair.py --target DIR/TARGET.gguf --draft DIR/DRAFT.gguf --prompts HumanEval.jsonl
        [--prompts FILE ...] [--llama-server PROGRAM] [--vllm PROGRAM] [--transformers PROGRAM]
        [--target-bf16 DIR --draft-bf16 DIR] [--streams 1,8] [--rounds 3] [--limit 8] [--out real_pair.json]

vLLM and transformers read the directories in bfloat16. Prompts are files of HumanEval, MT-bench (its first turns),
GSM8K or our own form; a bare text is put as a request to complete code. All servers run, all but one stopped. A round
asks each of them the same prompts, in the other order than the round before. No prompt comes twice: what a server kept
of an earlier answer would help it. A figure is the median of the rounds with its range.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from sametoken.bench.client import TimedAnswer, ask
from sametoken.bench.workloads import read_workload
from sametoken.client.client import Client
from sametoken.prompts.files import PromptItem
from sametoken.prompts.sources import Conversation, as_turn

CODE = "Complete the following Python function. Reply with code only.\n\n"
CONTEXT, ROWS, DRAFT_LEN = 1024, 8, 4
START_SECONDS, ANSWER_SECONDS = 600.0, 600.0


class Server(NamedTuple):
    """A server that runs: its address, its process and the seconds from start to ready."""

    url: str
    process: subprocess.Popen[bytes]
    seconds: float

    def stop(self) -> None:
        """Lets it compute nothing until `go_on`."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def sides(chosen: argparse.Namespace) -> dict[str, list[str]]:
    """The command of each side, without its port."""
    ours = [sys.executable, "-m", "sametoken.cli", "serve", chosen.target, f"--max-batch-size={ROWS}"]
    ours += [f"--max-seq-len={CONTEXT}", f"--threads={chosen.threads}", "--log-level=error"]
    draft = [f"--draft={chosen.draft}"]
    found = {
        "sametoken plain": [*ours, "--method=none"],
        "sametoken without options": ours,
        "sametoken draft": [*ours, *draft],
        "sametoken draft alone": [*ours, *draft, "--method=draft_target"],
    }
    if chosen.llama_server:
        theirs = [chosen.llama_server, "-m", chosen.target, "-c", str(ROWS * CONTEXT), "-np", str(ROWS), "--no-webui"]
        theirs += ["-t", str(chosen.threads), "-tb", str(chosen.threads), "--jinja", "--cache-ram", "0"]
        found["llama.cpp plain"] = theirs
        how = ["--spec-type", "draft-simple", "--spec-draft-n-max", str(DRAFT_LEN), "--spec-draft-p-min", "0.75"]
        found["llama.cpp draft"] = [*theirs, "-md", chosen.draft, *how]
    if chosen.vllm:
        theirs = [chosen.vllm, "serve", chosen.target_bf16, f"--max-model-len={CONTEXT}", f"--max-num-seqs={ROWS}"]
        found["vLLM plain"] = [*theirs, "--dtype=bfloat16"]
        how = json.dumps({"method": "draft_model", "model": chosen.draft_bf16, "num_speculative_tokens": DRAFT_LEN})
        found["vLLM draft"] = [*theirs, "--dtype=bfloat16", f"--speculative-config={how}"]
    if chosen.transformers:
        found["transformers plain"] = [chosen.transformers, "serve", chosen.target_bf16]
    return {name: command for name, command in found.items() if not chosen.only or name in chosen.only}


@contextmanager
def server(name: str, command: Sequence[str], log: Path) -> Iterator[Server]:
    """A server that is ready and then stopped until it is asked; ended with the block."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url, begin = f"http://127.0.0.1:{port}", time.perf_counter()
    environ = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as opened:
        process = subprocess.Popen(
            [*command, "--port", str(port)], stdout=opened, stderr=opened, start_new_session=True, env=environ
        )
    try:
        while not ready(url):
            if process.poll() is not None or time.perf_counter() - begin > START_SECONDS:
                raise SystemExit(f"{name} did not start; see {log}")
            time.sleep(0.02)
        found = Server(url, process, time.perf_counter() - begin)
        found.stop()
        yield found
    finally:
        Server(url, process, 0.0).kill()
        process.wait()


def ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def bodies(items: Sequence[PromptItem], chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """Requests for chat/completions."""
    found = []
    for number, item in enumerate(items):
        turn = item.source if isinstance(item.source, Conversation) else as_turn(CODE + item.source)
        found.append({"messages": list(turn.messages), "max_tokens": chosen.max_tokens, "seed": number,
                      "temperature": chosen.temperature, "stream_options": {"include_usage": True}})  # fmt: skip
    return found


async def visit(
    url: str, asked: Sequence[dict[str, Any]], streams: int, model: str | None = None
) -> tuple[list[TimedAnswer], float]:
    """The answers to all requests, so many at once, and the seconds of all.

    Args:
        model: its name at the server; without it, the first one that the server lists.
    """
    found: dict[int, TimedAnswer] = {}
    async with Client(url, None, ANSWER_SECONDS) as client:
        name = model or await client.first_model()
        numbers = iter(range(len(asked)))
        begin = time.perf_counter()

        async def worker() -> None:
            for i in numbers:
                async with Client(url, None, ANSWER_SECONDS) as own:  # llama.cpp's server ends one after a stream
                    found[i] = await ask(own, "chat/completions", {"model": name, **asked[i]}, time.perf_counter())

        await asyncio.gather(*(worker() for _ in range(streams)))
    return [found[i] for i in range(len(asked))], time.perf_counter() - begin


def figures(answers: Sequence[TimedAnswer], seconds: float) -> dict[str, float]:
    """Tokens a second over the whole time and of one stream after its first piece of text, and seconds to that.

    Raises:
        SystemExit: a request failed.
    """
    if failures := [answer.failure for answer in answers if answer.failure]:
        raise SystemExit(f"{len(failures)} of {len(answers)} requests failed: {failures[0]}")
    emitted = [each for each in (answer.emissions() for answer in answers) if len(each) > 1]
    decoding = [sum(count for _, count in each[1:]) / (each[-1][0] - each[0][0]) for each in emitted]
    return {
        "tokens_per_second": sum(answer.tokens or 0 for answer in answers) / seconds,
        "decode": statistics.median(decoding) if decoding else 0.0,
        "first": statistics.median(answer.ttft for answer in answers),
    }


def measure(chosen: argparse.Namespace, servers: dict[str, Server]) -> Iterator[dict[str, Any]]:
    """The figures of every side in each round of every workload and number of streams.

    Raises:
        SystemExit: a file has too few prompts, or a request failed.
    """
    for file in chosen.prompts:
        items, at = read_workload(file).items, 1  # the first one warms up
        for streams in chosen.streams:
            count = max(chosen.limit, 2 * streams)
            for turn in range(1, chosen.rounds + 1):
                if len(asked := bodies(items[at : at + count], chosen)) < count:
                    raise SystemExit(f"{file} has {len(items)} prompts; use fewer rounds or a smaller --limit")
                at += count
                answers: dict[str, list[TimedAnswer]] = {}
                for name in list(servers)[:: 1 if turn % 2 else -1]:
                    servers[name].go_on()
                    model = chosen.target_bf16 if name.startswith("transformers") else None  # it lists none
                    if turn == 1:
                        asyncio.run(visit(servers[name].url, bodies(items[:1], chosen), 1, model))
                    answers[name], seconds = asyncio.run(visit(servers[name].url, asked, streams, model))
                    servers[name].stop()
                    found = {"side": name, "workload": Path(file).stem, "streams": streams, "round": turn}
                    yield {**found, "load": os.getloadavg()[0], **figures(answers[name], seconds)}
                base, *others = servers
                for name in others:
                    equal = sum(a.text == b.text for a, b in zip(answers[name], answers[base], strict=True))
                    print(f"round {turn}: {name} says what {base} says in {equal} of {count}", flush=True)


def table(rounds: Sequence[dict[str, Any]]) -> str:
    """A row for each side, workload and number of streams: medians of the rounds with their ranges."""

    def spread(values: Sequence[float]) -> str:
        return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"

    lines = ["| prompts | streams | server | tokens/s | of one stream | s to first text |", f"|{'---|' * 6}"]
    for key in dict.fromkeys((each["workload"], each["streams"], each["side"]) for each in rounds):
        own = [each for each in rounds if (each["workload"], each["streams"], each["side"]) == key]
        cells = [spread([each[name] for each in own]) for name in ("tokens_per_second", "decode", "first")]
        lines.append(f"| {' | '.join([*map(str, key), *cells])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--prompts", action="append", required=True)
    parser.add_argument("--llama-server")
    parser.add_argument("--vllm")
    parser.add_argument("--transformers")
    parser.add_argument("--target-bf16")
    parser.add_argument("--draft-bf16")
    parser.add_argument("--only", action="append", help="name of a side; may be given several times")
    parser.add_argument("--streams", type=lambda text: [int(each) for each in text.split(",")], default=[1, ROWS])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=int, default=8, help="prompts of a round; two a stream at least")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=Path("real_pair.json"), help="record; logs lie beside it")
    chosen = parser.parse_args()
    if (chosen.vllm or chosen.transformers) and not (chosen.target_bf16 and chosen.draft_bf16):
        parser.error("vLLM and transformers need --target-bf16 and --draft-bf16")
    record: dict[str, Any] = {"command": sys.argv, "machine": platform.processor() or platform.machine(), "rounds": []}
    with ExitStack() as stack:
        servers = {}
        for name, command in sides(chosen).items():
            log = chosen.out.with_suffix(f".{name.replace(' ', '-')}.log")
            servers[name] = stack.enter_context(server(name, command, log))
            print(f"{name}: ready after {servers[name].seconds:.1f} s", flush=True)
        record["ready"] = {name: each.seconds for name, each in servers.items()}
        for found in measure(chosen, servers):
            record["rounds"].append(found)
            print(json.dumps(found), flush=True)
            chosen.out.write_text(json.dumps(record, indent=1) + "\n")
    print(table(record["rounds"]))


if __name__ == "__main__":
    main()
