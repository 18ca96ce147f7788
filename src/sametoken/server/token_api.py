"""Endpoints that turn text into tokens and back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sametoken.errors import RequestError
from sametoken.server.api import Api
from sametoken.server.chat_schema import DetokenizeRequest, TokenizeRequest
from sametoken.server.errors import ApiError, misread

PART = 2**16  # values that one call converts to JSON


class TokenApi(Api):
    """Tokenizer endpoints."""

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a prompt or of a conversation."""
        return await self._tokenized(await self._read(request, TokenizeRequest))

    async def _tokenized(self, body: TokenizeRequest) -> Response:
        if body.messages is not None:
            _, ids = await self._prompts.rendered(body.talk, bool(body.add_special_tokens), "messages")
        else:
            ids = await asyncio.to_thread(self._ids, body.prompt or "", body.add_special_tokens is not False)
        return await asyncio.to_thread(self._reply, ids, body.return_token_strs)

    def _reply(self, ids: list[int], strings: bool) -> Response:
        texts = [self._tokenizer.token_text(token) for token in ids] if strings else None
        size = self._worker.llm.max_seq_len
        return long_reply({"count": len(ids), "max_model_len": size, "tokens": ids, "token_strs": texts})

    def _ids(self, text: str, special_tokens: bool) -> list[int]:
        try:
            self._tokenizer.check_tokenisable(text)
            return self._tokenizer.encode(text, special_tokens)
        except RequestError as error:
            raise misread(error, "prompt") from error

    def _text(self, ids: Sequence[int]) -> str:
        size = self._worker.llm.config.vocab_size
        if (wrong := next((token for token in ids if token >= size), None)) is not None:
            raise ApiError(400, f"tokens: got {wrong}, expected token ids 0 .. {size - 1}", param="tokens")
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    async def tokenizer_info(self) -> Response:
        """Special tokens, sizes and the chat template, in vLLM's form."""
        return JSONResponse({**self._tokenizer.info(), "model_max_length": self._worker.llm.max_seq_len})

    async def detokenize(self, request: Request) -> Response:
        """Text of token ids, marks included."""
        body = await self._read(request, DetokenizeRequest)
        text = await asyncio.to_thread(self._text, body.tokens)
        names = ("prompt", "content") if self._worker.config.any_model else ("prompt",)  # vLLM's, and llama-server's
        return JSONResponse(dict.fromkeys(names, text))


def long_reply(content: Mapping[str, Any]) -> Response:
    """Reply with an object that has long lists; to be called in a thread, where it lets other threads run."""
    spelled = ",".join(f"{json.dumps(name)}:{''.join(_spelled(value))}" for name, value in content.items())
    return Response(f"{{{spelled}}}", media_type="application/json")


def _spelled(value: Any) -> Iterator[str]:
    """JSON of a value, in parts: one call for a million numbers would occupy Python's global lock for 0.1 s."""
    if not isinstance(value, list):
        yield _spell(value)
        return
    yield "["
    for start in range(0, len(value), PART):
        yield ("," if start else "") + _spell(value[start : start + PART])[1:-1]
    yield "]"


def _spell(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
