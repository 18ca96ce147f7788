"""Many clients at once for minutes, with all kinds of requests and many that leave: nothing leaks, nothing differs.

    python scripts/soak.py [--minutes 10] [--clients 64] [--kinds 400] [--seed 0] [--model MODEL] [--draft DRAFT]

Starts a server, lets clients ask for a limited number of different requests in random order (some streamed, some left
in the middle), and compares every whole answer with the same request sent alone to the idle server afterwards. At the
end pages, requests, file handles and threads must be back where they were, and memory must have stopped growing.
Otherwise it says what differs and exits with 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import httpx

WORDS = (
    "coffee",
    "weather",
    "book",
    "a",
    "the",
    "train",
    "please",
    "tomorrow",
    "why",
    "is",
    "how",
    "seven",
    "to",
    "my",
)
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
          "required": ["name", "age"], "additionalProperties": False}  # fmt: skip
UNLIKE = ("id", "created", "seconds", "draft_s", "verify_s", "other_s")  # what may differ between two equal answers
STATS = ("stats", "speculative", "prompt_tokens_details", "completion_tokens_details", "system_fingerprint")


def make_request(luck: random.Random) -> tuple[str, dict[str, Any]]:
    """A path and a body; everything that a client may choose is chosen by chance."""
    text = " ".join(luck.choices(WORDS, k=luck.randint(1, 60)))
    body: dict[str, Any] = {
        "max_tokens": luck.randint(1, 90),
        "temperature": luck.choice([0.0, 0.0, 0.5, 1.0, 1.3]),
        "seed": luck.randrange(1000),
    }
    options: list[dict[str, Any]] = [
        {}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}, {"presence_penalty": 0.7}, {"frequency_penalty": 0.4},
        {"repetition_penalty": 1.2}, {"logit_bias": {"300": 3}}, {"stop": ["e t", "."]}, {"n": 3}, {"ignore_eos": True},
        {"min_tokens": 5}, {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}}},
        {"structured_outputs": {"regex": "(yes|no), [a-z]{2,8}"}}, {"speculative": {"enabled": False}},
        {"speculative": {"method": "ngram", "max_draft_len": 4}}, {"speculative": {"adaptive": False, "report": True}},
        {"prediction": {"type": "content", "content": text}},
    ]  # fmt: skip
    body |= luck.choice(options)
    if luck.random() < 0.5 and "prediction" not in body:
        return "/v1/completions", body | {"prompt": text} | luck.choice([{}, {"logprobs": 2}, {"echo": True}])
    chat = luck.choice([{}, {"logprobs": True, "top_logprobs": 3}])
    return "/v1/chat/completions", body | chat | {"messages": [{"role": "user", "content": text}]}


def essence(value: Any) -> Any:
    """What must be equal: all but times, names and how the guesses went."""
    if isinstance(value, dict):
        return {k: essence(v) for k, v in value.items() if k not in UNLIKE and k not in STATS}
    return [essence(item) for item in value] if isinstance(value, list) else value


def streamed(lines: list[str]) -> Any:
    """The texts of a stream by choice, or its error."""
    texts: dict[int, str] = {}
    for line in lines:
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            return event["error"]
        for choice in event["choices"]:
            said = choice.get("text") or choice.get("delta", {}).get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + said
    return texts


def texts_of(answer: Any) -> dict[int, str]:
    """The texts of a whole answer by choice."""
    return {c["index"]: c["text"] if "text" in c else c["message"]["content"] or "" for c in answer["choices"]}


class Soak:
    """Clients of one server."""

    def __init__(self, url: str, kinds: int, seed: int) -> None:
        luck = random.Random(seed)
        self.requests = [make_request(luck) for _ in range(kinds)]
        self.seen: dict[int, list[Any]] = {}
        self.streams: dict[int, list[Any]] = {}
        self.counts: Counter[str] = Counter()
        self.refused: set[str] = set()
        self._url = url

    async def run(self, clients: int, seconds: float, seed: int) -> None:
        """Lets clients ask until the time is over; afterwards they are gone."""
        until = time.monotonic() + seconds
        async with self._connected():
            await asyncio.gather(*(self._one(random.Random(f"{seed} {i}"), until) for i in range(clients)))
        await asyncio.sleep(1)

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[None]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._url, timeout=600, limits=limits) as self._client:
            yield

    async def _one(self, luck: random.Random, until: float) -> None:
        while time.monotonic() < until:
            kind = luck.randrange(len(self.requests))
            path, body = self.requests[kind]
            how = luck.choice(("whole", "whole", "stream", "leave", "leave whole"))
            self.counts[how] += 1
            if how == "whole":
                answer = await self._client.post(path, json=body)
                self._keep(self.seen, kind, answer.status_code, answer.json())
            elif how == "leave whole":
                await self._left(path, body, luck.uniform(0.0, 0.3))
            else:
                await self._stream(kind, path, body, luck.randint(1, 12) if how == "leave" else None)

    async def _left(self, path: str, body: dict[str, Any], seconds: float) -> None:
        try:
            await asyncio.wait_for(self._client.post(path, json=body), seconds)
        except TimeoutError:
            self.counts["left"] += 1

    async def _stream(self, kind: int, path: str, body: dict[str, Any], most: int | None) -> None:
        lines: list[str] = []
        async with self._client.stream("POST", path, json={**body, "stream": True}) as answer:
            async for line in answer.aiter_lines():
                lines.append(line)
                if most is not None and len(lines) >= most:
                    self.counts["left"] += 1
                    return
            self._keep(self.streams, kind, answer.status_code, streamed(lines))

    def _keep(self, place: dict[int, list[Any]], kind: int, status: int, said: Any) -> None:
        self.counts[str(status)] += 1
        if status != 200:
            self.refused.add(json.dumps(said))
        known = place.setdefault(kind, [])
        if essence(said) not in known:
            known.append(essence(said))

    async def compare(self) -> list[str]:
        """What differs from the same request alone, one sentence each."""
        async with self._connected():
            alone = {kind: await self._alone(kind) for kind in sorted(self.seen.keys() | self.streams.keys())}
        wrong = []
        for kind, answer in alone.items():
            path, body = self.requests[kind]
            if any(said != essence(answer) for said in self.seen.get(kind, [])):
                wrong.append(f"{path} {json.dumps(body)}: {json.dumps(self.seen[kind])} is not {json.dumps(answer)}")
            if any(said != texts_of(answer) for said in self.streams.get(kind, [])):
                wrong.append(f"{path} {json.dumps(body)} streamed: {self.streams[kind]} is not {texts_of(answer)}")
        return wrong

    async def _alone(self, kind: int) -> Any:
        path, body = self.requests[kind]
        return (await self._client.post(path, json=body)).json()


def resources(pid: int, url: str) -> dict[str, float]:
    """Of the server: what must not grow."""
    status = Path(f"/proc/{pid}/status").read_text()
    metrics = httpx.get(f"{url}/metrics", timeout=60).text
    gauge = {name: float(re.search(rf"^sametoken_{name}{{.*?}} (\S+)$", metrics, re.M)[1])  # type: ignore[index]
             for name in ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting")}  # fmt: skip
    return gauge | {
        "files": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": float(re.search(r"Threads:\s+(\d+)", status)[1]),  # type: ignore[index]
        "memory_mb": round(float(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024, 1),  # type: ignore[index]
    }


async def soak(chosen: argparse.Namespace, url: str, pid: int) -> list[str]:
    """Runs it; returns what is wrong."""
    work = Soak(url, chosen.kinds, chosen.seed)
    await work.run(chosen.clients, min(60.0, chosen.minutes * 60 * 0.2), chosen.seed + 1)  # memory grows to its size
    before = resources(pid, url)
    print(json.dumps({"after warming up": before, "requests": dict(work.counts)}), flush=True)
    began = time.monotonic()
    await work.run(chosen.clients, chosen.minutes * 60, chosen.seed + 2)
    elapsed = time.monotonic() - began
    after = resources(pid, url)
    for _ in range(20):  # a connection that has just been closed is let go of when the server notices
        if after["files"] <= before["files"]:
            break
        await asyncio.sleep(0.5)
        after = resources(pid, url)
    print(json.dumps({"after": after, "requests": dict(work.counts), "seconds": round(elapsed)}), flush=True)
    allowed = {"threads": (os.cpu_count() or 1) + 4}  # those that asyncio starts as it needs them
    wrong = [f"{name} went from {before[name]} to {after[name]}" for name in before
             if name != "memory_mb" and after[name] > before[name] + allowed.get(name, 0)]  # fmt: skip
    if after["memory_mb"] > 1.1 * before["memory_mb"] + 20:
        wrong.append(f"memory went from {before['memory_mb']} to {after['memory_mb']} MB")
    wrong += [f"refused: {message}" for message in sorted(work.refused)]
    wrong += await work.compare()
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--kinds", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model")
    parser.add_argument("--draft")
    chosen = parser.parse_args()
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    model, draft = [chosen.model] if chosen.model else [], ["--draft", chosen.draft] if chosen.draft else []
    options = ["--port", str(port), "--max-queue", "1000", "--log-level", "warning"]
    server = subprocess.Popen([sys.executable, "-m", "sametoken.cli", "serve", *model, *draft, *options])
    url = f"http://127.0.0.1:{port}"
    try:
        while server.poll() is None:
            try:
                httpx.get(f"{url}/health").raise_for_status()
                break
            except httpx.HTTPError:
                time.sleep(0.1)
        wrong = asyncio.run(soak(chosen, url, server.pid))
    finally:
        server.send_signal(signal.SIGTERM)
        code = server.wait(60)
    wrong += [f"the server ended with {code}"] if code else []
    print("\n".join(wrong) or "every answer as alone; nothing leaked")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
