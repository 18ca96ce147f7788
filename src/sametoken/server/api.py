"""What all endpoints share: the model's names and what makes its prompts."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

from sametoken.server.answers import Head
from sametoken.server.errors import ApiError
from sametoken.server.prompts import Prompts
from sametoken.server.worker import Worker


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

    def _head(self, kind: str, model: str | None, given: str | None = None) -> Head:
        """The beginning of a reply, whose id holds `given` if the client brought that; an unknown model is refused."""
        if model is not None and model not in self._names:
            raise ApiError(
                404,
                f"the model {model[:100]!r} is not served here; available: {', '.join(self._names)}",
                "not_found_error",
                param="model",
                code="model_not_found",
            )
        return Head(f"{kind}-{given or secrets.token_hex(12)}", int(time.time()), self._names[0])
