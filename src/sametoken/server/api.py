"""Base class of all endpoints: it reads request bodies, checks the name of the model, and has the maker of prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeVar, cast

from pydantic import ValidationError
from pydantic_core import from_json, to_json
from starlette.requests import Request

from sametoken.server.body_size import LONG_BODY, check, read_body
from sametoken.server.errors import LOG, ApiError, invalid, shorten
from sametoken.server.fields import Body, field_names
from sametoken.server.http import check_content
from sametoken.server.prompts import Prompts
from sametoken.server.worker import Worker

B = TypeVar("B", bound=Body)


class Api:
    """Endpoints of one model.

    Args:
        worker: passes requests to the engine.
        names: names of the model for clients; replies contain the first one.
    """

    def __init__(self, worker: Worker, names: Sequence[str]) -> None:
        self._worker, self._names = worker, tuple(names)
        self._tokenizer, self._most = worker.llm.tokenizer, worker.config.max_body
        self._lenient = worker.config.ignore_unknown_fields
        self._prompts = Prompts(worker.llm, worker.config)

    async def _read(self, request: Request, kind: type[B]) -> B:
        """Read and validate the body of a request, including the name of the model.

        Raises:
            ApiError: the body is too large, compressed, of another content type, not JSON, or does not match `kind`;
                or the model is not served.
        """
        self._check_headers(request)
        received = await read_body(request, self._most)
        request.state.is_long = len(received) > LONG_BODY
        if request.state.is_long:
            body = await asyncio.to_thread(_parsed, kind, received, self._lenient)
        else:
            body = _parsed(kind, received, self._lenient)
        self._worker.wake()
        self._check_model(cast(Any, body).model)  # every body has this field
        return body

    def _check_headers(self, request: Request) -> None:
        """Refuse a body that is compressed or, on a server without keys, of another content type than JSON."""
        if not self._worker.config.api_key:
            check_content(request.headers)
        if (packed := request.headers.get("content-encoding", "identity").lower()) not in ("", "identity"):
            message = f"the body is said to be compressed (Content-Encoding: {packed[:40]}); send it as it is"
            raise ApiError(415, message, code="unsupported_encoding", headers={"Accept-Encoding": "identity"})

    def _check_model(self, model: str | None) -> None:
        if model is not None and model not in self._names and not self._worker.config.any_model:
            raise ApiError(
                404,
                f"the model {model[:100]!r} is not served here; available: {', '.join(self._names)}",
                "not_found_error",
                param="model",
                code="model_not_found",
            )


def _parsed(kind: type[B], received: bytes, lenient: bool) -> B:
    """Parse and validate a body; the slow part of reading a request, including the wording of its errors.

    Args:
        lenient: leave out unknown fields of the body itself.
    """
    if len(received) > LONG_BODY:
        check(received)
    try:
        return kind.model_validate_json(received)
    except ValidationError as error:
        unknown = {
            problem["loc"][0]
            for problem in (error.errors(include_url=False, include_input=False) if lenient else ())
            if problem["type"] == "extra_forbidden" and len(problem["loc"]) == 1
        }
        if not unknown:
            raise invalid(error, field_names(kind), received) from error
    LOG.debug("fields of a request that have no effect: %s", ", ".join(shorten(str(each)) for each in sorted(unknown)))
    return _parsed(
        kind, to_json({key: value for key, value in from_json(received).items() if key not in unknown}), False
    )
