"""Endpoints that turn text into tokens and back."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sametoken.errors import RequestError
from sametoken.server.api import Api
from sametoken.server.chat_schema import DetokenizeRequest, TokenizeRequest
from sametoken.server.errors import ApiError, misread


class TokenApi(Api):
    """What the tokenizer does."""

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a prompt or of a conversation."""
        body = await self._read(request, TokenizeRequest)
        ids = await asyncio.to_thread(self._tokens, body)
        strings = [self._tokenizer.token_text(token) for token in ids] if body.return_token_strs else None
        return JSONResponse(
            {"count": len(ids), "max_model_len": self._worker.llm.max_seq_len, "tokens": ids, "token_strs": strings}
        )

    def _tokens(self, body: TokenizeRequest) -> list[int]:
        if body.messages is not None:
            return self._prompts.render(body.talk, bool(body.add_special_tokens), "messages")[1]
        try:
            return self._tokenizer.encode(body.prompt or "", body.add_special_tokens is not False)
        except RequestError as error:
            raise misread(error, "prompt") from error

    async def tokenizer_info(self) -> Response:
        """Special tokens, sizes and the chat template, as vLLM says it."""
        return JSONResponse({**self._tokenizer.info(), "model_max_length": self._worker.llm.max_seq_len})

    async def detokenize(self, request: Request) -> Response:
        """Text of token ids, marks included."""
        body = await self._read(request, DetokenizeRequest)
        size = self._worker.llm.config.vocab_size
        if wrong := [token for token in body.tokens if token >= size]:
            raise ApiError(400, f"tokens: got {wrong[0]}, expected token ids 0 .. {size - 1}", param="tokens")
        text = await asyncio.to_thread(self._tokenizer.decode, body.tokens, skip_special_tokens=False)
        return JSONResponse({"prompt": text})
