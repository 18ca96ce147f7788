"""llama.cpp as a child of the benchmark: a llama-server that stays up, asked over HTTP.

One row is timed by the server's own clock, several by when their events come.
"""

from __future__ import annotations

import json
import queue
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from peers_engines.protocol import Clock, die_with_parent, serve

START_SECONDS = 300
UNKNOWN = -1  # a token whose id the server did not tell
DRAFT = ("--spec-type", "draft-simple", "--spec-draft-n-min", "0")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def arguments(spec: dict[str, Any], port: int) -> list[str]:
    """The command of a server: a slot a row, threads as given, and a chain of fixed length for a draft.

    "draft" drafts as many tokens as every other engine; "draft-p75" stops below a probability of 0.75, which spares a
    kernel whose cost grows with the rows of a verification.
    """
    threads = str(spec["threads"])
    rows = spec.get("rows", 1)
    command = [spec["server"], "-m", spec["model"], "-c", str(rows * spec["max_len"]), "-np", str(rows), "-t", threads]
    command += ["-tb", threads, "--host", "127.0.0.1", "--port", str(port), "--no-webui", "--cache-ram", "0"]
    if spec["mode"] != "plain":
        least = "0.75" if spec["mode"] == "draft-p75" else "0"
        command += ["-md", spec["draft"], *DRAFT, "--spec-draft-p-min", least]
        command += ["--spec-draft-n-max", str(spec["draft_len"]), "-td", threads, "-tbd", threads]
    return command


class LlamaCpp:
    """A running server and its address."""

    def __init__(self, spec: dict[str, Any]) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.server = subprocess.Popen(
            arguments(spec, port), stdout=2, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent
        )
        deadline = time.monotonic() + START_SECONDS
        while not self._healthy():
            if self.server.poll() is not None:
                raise RuntimeError(f"llama-server ended with code {self.server.returncode}; its log says why")
            if time.monotonic() > deadline:
                raise RuntimeError(f"llama-server was not ready after {START_SECONDS} s")
            time.sleep(0.1)
        with urllib.request.urlopen(self.url + "/props") as reply:
            self.version = str(json.load(reply).get("build_info", "unknown"))

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=5) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def run(self, mode: str, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        if len(prompts) == 1:
            with self._ask(prompts[0], max_tokens, stream=False) as reply:
                return read_answer(json.load(reply), max_tokens)
        clock, events = Clock(len(prompts)), queue.SimpleQueue[tuple[int, dict[str, Any] | Exception]]()

        def listen(row: int) -> None:
            try:
                with self._ask(prompts[row], max_tokens, stream=True) as reply:
                    for event in read_events(reply):
                        events.put((row, event))
            except Exception as error:
                events.put((row, error))

        for row in range(len(prompts)):
            threading.Thread(target=listen, args=(row,), daemon=True).start()
        accepted, going = 0, len(prompts)
        while going:
            row, event = events.get()
            if isinstance(event, Exception):
                raise event
            clock.emit({row: new_tokens(event, len(clock.tokens[row]))})
            if event["stop"]:
                accepted += event["timings"].get("draft_n_accepted", 0)
                going -= 1
        answer = clock.answer(max_tokens)
        return answer | {"steps": len(prompts) * max_tokens - accepted}

    def _ask(self, prompt: list[int], max_tokens: int, stream: bool) -> Any:
        body = {"prompt": prompt, "n_predict": max_tokens, "temperature": 0, "top_k": 1, "return_tokens": True}
        return urllib.request.urlopen(
            urllib.request.Request(
                self.url + "/completion",
                json.dumps(body | {"stream": stream, "ignore_eos": True}).encode(),
                {"Content-Type": "application/json"},
            )
        )


def read_events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The events of a stream of server-sent events, each a line of JSON."""
    for line in lines:
        if line.startswith(b"data: {"):
            yield json.loads(line[len(b"data: ") :])


def new_tokens(event: Mapping[str, Any], known: int) -> list[int]:
    """The tokens that an event adds to `known` ones of its row.

    The server holds back tokens that end within a character and then names only the last one: those are UNKNOWN.
    """
    tokens: list[int] = event["tokens"]
    return [UNKNOWN] * (event["tokens_predicted"] - known - len(tokens)) + tokens


def read_answer(result: dict[str, Any], max_tokens: int) -> dict[str, Any]:
    """The common answer from llama-server's: its clock runs from the first token to the last.

    Raises:
        RuntimeError: the server stopped early.
    """
    tokens, timings = result["tokens"], result["timings"]
    if len(tokens) < max_tokens:
        raise RuntimeError(f"{len(tokens)} tokens came, expected {max_tokens}: the server stopped by itself")
    timed = timings["predicted_n"] - 1
    return {
        "tokens": [tokens[:max_tokens]],
        "timed_tokens": timed,
        "seconds": timings["predicted_ms"] / 1e3,
        "steps": timed - timings.get("draft_n_accepted", 0),
        "first_seconds": timings["prompt_ms"] / 1e3,
    }


if __name__ == "__main__":
    serve(LlamaCpp)
