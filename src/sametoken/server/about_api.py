"""Endpoints about the server itself: models, health, configuration, metrics, and the web pages."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sametoken import __version__
from sametoken.check.machine import describe_machine
from sametoken.server import playground
from sametoken.server.api import Api
from sametoken.server.errors import not_supported
from sametoken.server.llama.metrics import metrics_text
from sametoken.server.worker import Worker


class AboutApi(Api):
    """Endpoints that describe the server.

    Args:
        worker, names: see `Api`.
        info: the resolved configuration, for /server_info.
    """

    def __init__(self, worker: Worker, names: Sequence[str], info: Mapping[str, Any]) -> None:
        super().__init__(worker, names)
        self._info, self._created = dict(info), int(time.time())

    async def models(self) -> Response:
        """List of the names of the model."""
        return JSONResponse({"object": "list", "data": [self._model(name) for name in self._names]})

    async def model(self, name: str) -> Response:
        """Description of the model under one of its names."""
        self._check_model(name)
        return JSONResponse(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        about = {"id": name, "object": "model", "created": self._created, "owned_by": "sametoken"}
        root = str(self._info.get("model") or name)
        return {**about, "root": root, "parent": None, "max_model_len": self._worker.llm.max_seq_len}

    async def health(self) -> Response:
        """Status 200 while requests are accepted; 503 while the server stops or if the engine failed."""
        return JSONResponse({"status": "ok" if self._worker.ready else "stopping"}, 200 if self._worker.ready else 503)

    async def ping(self) -> Response:
        """Health of the server at SageMaker's path; equal to /health."""
        return await self.health()

    async def load(self) -> Response:
        """Number of open requests, running or waiting, in vLLM's form."""
        return JSONResponse({"server_load": self._worker.open_requests})

    async def live(self) -> Response:
        """Status 200 while the process runs."""
        return JSONResponse({"status": "ok"})

    async def version(self) -> Response:
        """Version of sametoken, and the version of another server that --reported-version sets."""
        reported = self._worker.config.reported_version or __version__
        return JSONResponse({"version": reported, "sametoken": __version__})

    async def server_info(self) -> Response:
        """Resolved configuration, options of requests, load of the engine, and hardware of the machine."""
        llm, machine = self._worker.llm, describe_machine()
        offers = {
            "method": llm.method,
            "methods": list(llm.methods),
            "max_draft_len": llm.speculative.max_draft_len,
            "max_seq_len": llm.max_seq_len,
            "chat": self._tokenizer.has_chat_template,
        }
        return JSONResponse(
            {**self._info, "offers": offers, "load": self._worker.load()._asdict(), "machine": machine.to_json()}
        )

    async def page(self, request: Request) -> Response:
        """File of the playground or of the API reference."""
        return playground.file_reply(request.scope["path"], self._worker.config.root_path)

    async def metrics(self) -> Response:
        """Metrics in Prometheus' text format."""
        if not self._worker.config.metrics:
            raise not_supported("this server does not show its metrics; start it with --metrics")
        text = self._worker.metrics.text() + metrics_text(self._worker).encode()
        headers = {"Process-Start-Time-Unix": str(self._created)}
        return Response(text, media_type="text/plain; version=0.0.4", headers=headers)
