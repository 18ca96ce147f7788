"""What all endpoints share: the model's names and what makes its prompts."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any, TypeVar, cast

from starlette.requests import Request

from sametoken.server.errors import ApiError
from sametoken.server.fields import Body
from sametoken.server.http import read
from sametoken.server.prompts import Prompts
from sametoken.server.words import Head
from sametoken.server.worker import Worker

B = TypeVar("B", bound=Body)


class Api:
    """Endpoints of one model.

    Args:
        worker: what serves requests.
        names: what clients may call the model; the first stands in replies.
    """

    def __init__(self, worker: Worker, names: Sequence[str]) -> None:
        self._worker, self._names = worker, tuple(names)
        self._tokenizer, self._most = worker.llm.tokenizer, worker.config.max_body
        self._prompts = Prompts(self._tokenizer, worker.llm.max_seq_len, worker.config.reasoning_parser)

    async def _read(self, request: Request, kind: type[B]) -> B:
        """The body of a request, checked; its model is one that is served."""
        body = await read(request, kind, self._most)
        self._check_model(cast(Any, body).model)  # every body of a request has this field
        return body

    def _head(self, prefix: str, given: str | None) -> Head:
        """The beginning of a reply, whose id holds `given` if the client brought that."""
        return Head(f"{prefix}-{given or secrets.token_hex(12)}", int(time.time()), self._names[0])

    def _check_model(self, model: str | None) -> None:
        if model is not None and model not in self._names:
            raise ApiError(
                404,
                f"the model {model[:100]!r} is not served here; available: {', '.join(self._names)}",
                "not_found_error",
                param="model",
                code="model_not_found",
            )
