"""llama.cpp as a child of the benchmark: a llama-server that stays up, asked over HTTP, timed by its own clock."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from typing import Any

from peers_engines.protocol import die_with_parent, serve

START_SECONDS = 300
DRAFT = ("--spec-type", "draft-simple", "--spec-draft-n-min", "0")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def arguments(spec: dict[str, Any], port: int) -> list[str]:
    """The command of a server: one slot, threads as given, and a chain of fixed length for a draft.

    "draft" drafts as many tokens as every other engine; "draft-p75" stops below a probability of 0.75, which spares a
    kernel whose cost grows with the rows of a verification.
    """
    threads = str(spec["threads"])
    command = [spec["server"], "-m", spec["model"], "-c", str(spec["max_len"]), "-np", "1", "-t", threads]
    command += ["-tb", threads, "--host", "127.0.0.1", "--port", str(port), "--no-webui"]
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

    def run(self, mode: str, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        body = {"prompt": prompt, "n_predict": max_tokens, "temperature": 0, "top_k": 1, "return_tokens": True}
        request = urllib.request.Request(
            self.url + "/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as reply:
            result = json.load(reply)
        return read_answer(result, max_tokens)


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
        "tokens": tokens[:max_tokens],
        "timed_tokens": timed,
        "seconds": timings["predicted_ms"] / 1e3,
        "steps": timed - timings.get("draft_n_accepted", 0),
        "first_seconds": timings["prompt_ms"] / 1e3,
    }


if __name__ == "__main__":
    serve(LlamaCpp)
