"""A server in this process on a free port, and a gate that lets its engine step only when a test says so."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from openai import OpenAI

from sametoken.engine.llm import LLM
from sametoken.options.server import ServerConfig
from sametoken.server.listen import bind, loop_factory
from sametoken.server.run import EngineServer, make_server

MODEL = "tiny"


class Running(NamedTuple):
    """A server that accepts connections."""

    url: str
    server: EngineServer
    llm: LLM
    loop: asyncio.AbstractEventLoop
    client: httpx.Client

    def stop(self) -> None:
        """As a signal would."""
        self.loop.call_soon_threadsafe(self.server.stop, "test")

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.client.post(path, json=body, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.client.get(path, **options)


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    last = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < last, f"it did not happen within {seconds:g} s"
        time.sleep(0.01)


def with_template(target: str, directory: Path, template: str) -> str:
    """A copy of a target that puts conversations otherwise."""
    shutil.copytree(target, directory, dirs_exist_ok=True)
    (directory / "chat_template.jinja").write_text(template)
    return str(directory)


POOLING = {"last": "pooling_mode_lasttoken", "mean": "pooling_mode_mean_tokens", "first": "pooling_mode_cls_token"}


def with_pooling(target: str, directory: Path, mode: str, normalize: bool) -> str:
    """A copy of a target with sentence-transformers' files, which make it an embedding model."""
    shutil.copytree(target, directory, dirs_exist_ok=True)
    kinds = ["Transformer", "Pooling", *["Normalize"] * normalize]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"include_prompt": True, POOLING[mode]: True}))
    return str(directory)


def openai_client(server: Running) -> OpenAI:
    """OpenAI's own client of a server, which does not try again."""
    return OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


@contextmanager
def running(llm: LLM, info: Mapping[str, Any] | None = None, **settings: Any) -> Iterator[Running]:
    """A server of `llm`, which ends with the block; settings are those of `ServerConfig`."""
    config = ServerConfig(**{"port": 0, "drain_seconds": 0.0, **settings})
    ready, made = threading.Event(), []
    with bind(config) as bound:

        async def main() -> None:
            server = make_server(llm, config, info or {"model": MODEL}, ready.set)
            url = f"http://127.0.0.1:{bound[0].getsockname()[1]}"
            client = httpx.Client(base_url=url, timeout=60)
            made.append(Running(url, server, llm, asyncio.get_running_loop(), client))
            await server.serve(bound)

        def run() -> None:
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                runner.run(main())

        thread = threading.Thread(target=run)
        thread.start()
        assert ready.wait(30)
        try:
            yield made[0]
        finally:
            with suppress(RuntimeError):  # the loop of a server that was stopped is closed, or closes just now
                made[0].stop()
            made[0].client.close()
            thread.join(30)
            assert not thread.is_alive()


class Gate:
    """Stands before an engine's step: each waits for a permit, until the gate is opened."""

    def __init__(self, llm: LLM) -> None:
        self._permits, self._step, self._open = threading.Semaphore(0), llm.engine.step, False
        self.steps = 0
        llm.engine.step = self._guarded  # type: ignore[method-assign]

    def _guarded(self) -> Any:
        if not self._open:
            assert self._permits.acquire(timeout=60)
        self.steps += 1
        return self._step()

    def let(self, steps: int) -> None:
        self._permits.release(steps)

    def open(self) -> None:
        self._open = True
        self._permits.release(1)
