"""POST /v1/embeddings: embeddings of texts by embedding models, computed by the engine's thread between its steps."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sametoken.checkpoint.pooling import Pooling
from sametoken.errors import RequestError, SametokenError
from sametoken.server.api import Api
from sametoken.server.errors import CLIENT_GONE, ApiError, misread, stopped
from sametoken.server.fields import Body, Prompts
from sametoken.server.http import unless_gone
from sametoken.server.worker import Worker

if TYPE_CHECKING:
    from sametoken.train.dataset.extraction import FeatureReader


class EmbeddingsRequest(Body):
    """The body of POST /v1/embeddings."""

    model: str | None = None
    """a name that `/v1/models` lists; without it: the model that is served."""
    input: Prompts
    """text, texts, token ids or lists of them."""
    encoding_format: Literal["float", "base64"] | None = None
    """`float` (the default), or `base64` of little-endian float32."""
    dimensions: int | None = None
    """only the model's own number of dimensions."""
    user: str | None = None
    """no effect."""


class EmbeddingApi(Api):
    """Endpoint for embeddings."""

    def __init__(self, worker: Worker, names: Sequence[str]) -> None:
        super().__init__(worker, names)
        self._reader: FeatureReader | None = None  # made at first use, because it has a KV cache of its own
        self._turn = asyncio.Lock()

    async def embeddings(self, request: Request) -> Response:
        """Embeddings of texts; only with an embedding model."""
        body = await self._read(request, EmbeddingsRequest)
        llm = self._worker.llm
        if llm.pooling is None:
            raise ApiError(
                400, f"{self._names[0]} is no embedding model: it has no modules.json that defines its pooling; serve "
                "one that has, or use /v1/completions", code="not_an_embedding_model",
            )  # fmt: skip
        if body.dimensions not in (None, llm.config.hidden_size):
            words = f"dimensions: got {body.dimensions}, expected {llm.config.hidden_size}, which the model has"
            raise ApiError(400, words, param="dimensions")
        prompts = await asyncio.to_thread(self._spelled, body.input)
        try:
            vectors = await unless_gone(request.receive, self._vectors(prompts, llm.pooling))
        except SametokenError as error:
            raise stopped(error) from error
        if vectors is None:
            return Response(status_code=CLIENT_GONE)
        total = sum(map(len, prompts))
        return JSONResponse(
            {
                "object": "list",
                "model": self._names[0],
                "data": [
                    {"object": "embedding", "index": i, "embedding": _encoded(vector, body.encoding_format)}
                    for i, vector in enumerate(vectors)
                ],
                "usage": {"prompt_tokens": total, "total_tokens": total},
            }
        )

    def _spelled(self, prompts: Sequence[str | Sequence[int]]) -> list[list[int]]:
        llm = self._worker.llm
        try:
            spelled = [self._tokenizer.encode(text) if isinstance(text, str) else list(text) for text in prompts]
        except RequestError as error:
            raise misread(error, "input") from error
        for ids in spelled:
            if not 0 < len(ids) <= llm.max_seq_len:
                words = f"input: got a text of {len(ids)} tokens, expected 1 to {llm.max_seq_len}"
                raise ApiError(400, words, param="input")
            if wrong := [token for token in ids if not 0 <= token < llm.config.vocab_size]:
                words = f"input: got {wrong[0]}, expected token ids 0 .. {llm.config.vocab_size - 1}"
                raise ApiError(400, words, param="input")
        return spelled

    async def _vectors(self, prompts: Sequence[Sequence[int]], pooling: Pooling) -> list[list[float]]:
        async with self._turn:
            return [await self._vector(ids, pooling) for ids in prompts]

    async def _vector(self, ids: Sequence[int], pooling: Pooling) -> list[float]:
        """Embedding of a text, computed in pieces, between which the engine makes the steps of other requests."""
        from sametoken.train.dataset.extraction import PIECE_TOKENS, FeatureReader  # most servers need no trainer

        engine, tokens = self._worker.engine, torch.tensor(ids)
        if self._reader is None:
            decoder = self._worker.llm.engine.runner.decoder
            self._reader = await engine.call(partial(FeatureReader, decoder, (), self._worker.llm.max_seq_len))
        tokens = tokens.to(self._reader.device)
        pieces = [await engine.call(partial(self._reader.piece, tokens, at)) for at in range(0, len(ids), PIECE_TOKENS)]
        found: list[float] = pooling(torch.cat(pieces)[:, 0]).tolist()
        return found


def _encoded(vector: Sequence[float], form: str | None) -> Any:
    if form != "base64":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
