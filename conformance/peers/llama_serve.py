"""Serves prompts greedily with llama.cpp's llama-server, with or without an EAGLE-3 draft; needs nothing but Python.

    python llama_serve.py JOB.json OUT.json

JOB.json: {"server", "model": GGUF, "draft": GGUF or null, "draft_len", "max_tokens", "prompts": lists of ids}.
OUT.json: {"versions", "outputs": lists of ids, "drafted", "accepted"}, or {"error"}.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

START_SECONDS = 120
EXACT = ["-ctk", "f32", "-ctv", "f32", "-fa", "off"]  # keys and values are rounded to 16 bits otherwise


def command(job: dict[str, Any], port: int) -> list[str]:
    made = [job["server"], "-m", job["model"], "-c", "512", "-np", "1", "-t", "1", "-tb", "1", *EXACT]
    made += ["--host", "127.0.0.1", "--port", str(port), "--no-webui", "--cache-ram", "0"]
    if job["draft"]:
        made += ["-md", job["draft"], "--spec-type", "draft-eagle3", "--spec-draft-n-max", str(job["draft_len"])]
        made += ["--spec-draft-n-min", "0", "--spec-draft-p-min", "0", "-ctkd", "f32", "-ctvd", "f32", "-td", "1"]
    return made


def ask(url: str, body: dict[str, Any] | None = None, seconds: float = 300.0) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(
        urllib.request.Request(url, data, {"Content-Type": "application/json"}), timeout=seconds
    ) as reply:
        found: dict[str, Any] = json.load(reply)
        return found


def wait(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            ask(url + "/health", seconds=5)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"llama-server is not up (exit code {server.poll()}); its log says why") from None
            time.sleep(0.2)
        else:
            return


def serve(job: dict[str, Any]) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    server = subprocess.Popen(command(job, port), stdin=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        wait(url, server)
        version = str(ask(url + "/props").get("build_info", "unknown"))
        found: dict[str, Any] = {"versions": {"llama.cpp": version}, "outputs": [], "drafted": 0, "accepted": 0}
        for prompt in job["prompts"]:
            asked = {"prompt": prompt, "n_predict": job["max_tokens"], "temperature": 0, "top_k": 1, "ignore_eos": True}
            answer = ask(url + "/completion", {**asked, "return_tokens": True, "cache_prompt": False})
            found["outputs"].append(answer["tokens"][: job["max_tokens"]])
            found["drafted"] += answer["timings"].get("draft_n", 0)
            found["accepted"] += answer["timings"].get("draft_n_accepted", 0)
        return found
    finally:
        server.kill()
        server.wait()


def main(job: Path, out: Path) -> None:
    try:
        answer = serve(json.loads(job.read_text()))
    except (RuntimeError, OSError) as error:  # what a peer refuses is a result
        answer = {"versions": {}, "error": f"{type(error).__name__}: {error}"[:300]}
    out.write_text(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
