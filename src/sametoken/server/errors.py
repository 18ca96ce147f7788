"""Errors as HTTP replies: a status, and OpenAI's error envelope with the wrong value, the expected one, and advice.

{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}; an error event in an open stream is this object.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from pydantic import ValidationError
from pydantic_core import from_json
from starlette.responses import JSONResponse
from typing_extensions import TypedDict

from sametoken.errors import (
    CheckpointError,
    EngineError,
    ModelOutputError,
    PromptTooLongError,
    RequestError,
    SametokenError,
    found_wrong,
)
from sametoken.server.hints import of_field

LOG = logging.getLogger("sametoken.server")
QUEUE_FULL = "queue_full"
CLIENT_GONE = 499  # nginx's status for a client that disconnected; used in logs alone
_SHOWN = 120  # characters of a value or name that a message repeats


class ErrorBody(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(TypedDict):
    """Body of every reply with a status above 399."""

    error: ErrorBody


class AnthropicBody(TypedDict):
    type: str
    message: str


class AnthropicError(TypedDict):
    """Body of every /v1/messages reply with a status above 399."""

    type: Literal["error"]
    error: AnthropicBody


MESSAGES = "/v1/messages"  # prefix of the paths with Anthropic's envelope
ANTHROPIC = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


class ApiError(Exception):
    """Error that ends a request with an error reply.

    Args:
        status: HTTP status.
        message: text for the caller.
        kind: `type` of OpenAI's envelope.
        param: field of the body that is at fault.
        code: name of the error for programs.
        headers: headers of the reply.
        details: further fields of llama-server's envelope.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.details = dict(details or {})
        self.status, self.headers = status, dict(headers or {})
        self.body: ErrorReply = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    @property
    def anthropic(self) -> AnthropicError:
        """Return this error in Anthropic's envelope."""
        kind = ANTHROPIC.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.body["error"]["message"]}}

    @property
    def llama(self) -> dict[str, Any]:
        """Return this error in llama-server's envelope, whose code is the status."""
        error = self.body["error"]
        return {"error": {"code": self.status, "message": error["message"], "type": error["type"], **self.details}}


def reply(error: ApiError, path: str = "", llama: bool = False) -> JSONResponse:
    """Reply with an error; /v1/messages and paths below it get Anthropic's envelope.

    Args:
        llama: True if other paths get llama-server's envelope.
    """
    body = error.anthropic if MESSAGES in path else error.llama if llama else error.body
    return JSONResponse(body, error.status, error.headers)


def refused(error: RequestError, fields: Mapping[str, str]) -> ApiError:
    """API error for a prompt or parameter that the engine refuses.

    Args:
        fields: names of the body's fields, by the names in the engine's errors.
    """
    code, details = None, dict[str, Any]()
    if isinstance(error, PromptTooLongError):
        code = "context_length_exceeded"
        words = f"request ({error.tokens} tokens) exceeds the available context size ({error.context} tokens)"
        details = {
            "message": f"{words}, try increasing it", "type": "exceed_context_size_error",
            "n_prompt_tokens": error.tokens, "n_ctx": error.context,
        }  # fmt: skip
    field = fields.get(error.field, "")
    message = str(error.about(field or error.field))
    inner = error.place if field and error.place.startswith(".") else ""
    return ApiError(400, shorten(message), param=field + inner or None, code=code, details=details)


def misread(error: RequestError | CheckpointError | RecursionError, field: str) -> ApiError:
    """API error for a field of the body that the tokenizer or the chat template refuses."""
    return ApiError(400, shorten(f"{field}: {error}"), param=field)


def worded(error: Exception, fields: Mapping[str, str], seconds: float | None) -> ApiError:
    """API error for an exception that ended a request after the engine had accepted it.

    Args:
        fields: names of the body's fields, by the names in the engine's errors.
        seconds: time limit of a request.
    """
    once = {"x-should-retry": "false"}  # a second try would end with the error too
    match error:
        case ApiError():
            return error
        case RequestError():
            return refused(error, fields)
        case ModelOutputError():
            return ApiError(500, shorten(str(error)), "server_error", code="model_output_invalid", headers=once)
        case TimeoutError():
            message = f"the request was not done within {seconds:g} s (request_timeout); ask for fewer tokens"
            return ApiError(408, message, "timeout_error", code="timeout", headers=once)
        case EngineError():  # the request may be the cause, so that clients shall not send it again at once
            message = f"{error}; the server ends, its log has the details"
            return ApiError(500, message, "server_error", code="engine_failed", headers=once)
        case SametokenError():
            return stopped(error)
        case _:
            return failed(error)


def stopped(error: SametokenError) -> ApiError:
    """API error for an accepted request that was not finished before the engine stopped."""
    message = f"the server stopped before this request was done ({error}); send it again"
    return ApiError(503, message, "server_error", code="server_stopped", headers={"Retry-After": "1"})


def stopping() -> ApiError:
    """API error for a new request while the server stops."""
    message = "the server is shutting down; send the request to another one, or again later"
    return ApiError(503, message, "server_error", code="server_stopping", headers={"Retry-After": "5"})


def not_supported(message: str) -> ApiError:
    """API error for a function that is switched off or not supported."""
    return ApiError(501, message, "not_supported_error")


def failed(error: Exception) -> ApiError:
    """API error for an internal error, whose details are in the log alone."""
    LOG.error("a request failed", exc_info=error)
    return ApiError(500, "the server had an internal error; its log has the details", "server_error")


def invalid(error: ValidationError, known: Iterable[str], given: bytes) -> ApiError:
    """API error for the first problem that pydantic found in a body, as one sentence.

    Args:
        known: names of the body's fields, for the suggestion of one that is similar to an unknown name.
        given: the body, as JSON.
    """
    problem = error.errors(include_url=False)[0]
    missing = problem["type"] == "missing"
    body = {} if problem["type"] == "json_invalid" else from_json(given)
    place = _place(body, problem["loc"][:-1] if missing else problem["loc"])
    where = ".".join(shorten(str(part)) for part in (*place, *problem["loc"][-1:] * missing))
    match problem["type"]:
        case "json_invalid":
            return ApiError(400, f"the body is not valid JSON: {shorten(problem['msg'])}; send one JSON object")
        case "extra_forbidden" if len(problem["loc"]) == 1:
            return ApiError(400, of_field(where, known), param=where, code="unknown_parameter")
        case "extra_forbidden":
            return ApiError(400, f"unknown field {where!r}; leave it out", param=where, code="unknown_parameter")
        case "missing":
            return ApiError(
                400, f"{where} is missing; expected a value", param=where, code="missing_required_parameter"
            )
        case "model_type" | "model_attributes_type" if not where:
            return ApiError(400, f"the body is {_value(problem['input'])}, expected a JSON object")
        case _:
            wrong = found_wrong(problem)
            own = problem.get("ctx", {}).get("error")
            if isinstance(own, RequestError) and own.field:
                return ApiError(400, shorten(wrong), param=own.field)
            if not where:  # a contradiction of several fields, which the message names
                return ApiError(400, shorten(wrong))
            code = None if own is not None else problem["type"]  # pydantic's name of the error, as in vLLM's messages
            words = f"{where}: got {_value(problem['input'])}, {shorten(_lower(wrong))}{f' ({code})' if code else ''}"
            return ApiError(400, words, param=where, code=code)


def _place(given: Any, parts: Sequence[int | str]) -> tuple[int | str, ...]:
    """Path of an error within a body, from pydantic's path, in which names of union members are left out.

    If a part can be a key of the body or the name of a union member, the path that contains the last part is returned.
    """
    if not parts:
        return ()
    first, *rest = parts
    without = _place(given, rest)
    there = first in given if isinstance(given, dict) else isinstance(given, list) and first in range(len(given))
    if not there:
        return without
    within = (first, *_place(given[first], rest))
    return max(within, without, key=lambda found: (found[-1:] == (parts[-1],), len(found)))


def shorten(text: str) -> str:
    """Text of a caller, cut to a length that fits into a message."""
    return text if len(text) <= 4 * _SHOWN else f"{text[: 4 * _SHOWN]}..."


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _value(value: Any) -> str:
    # A large value is described by its size, because its text would be slow to make and hard to read.
    if isinstance(value, list | dict) and len(value) > 8:
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    if isinstance(value, int) and abs(value) >= 10**30:
        return "an integer of more than 30 digits"
    shown = repr(value[:_SHOWN] if isinstance(value, str) else value)
    return shown if len(shown) <= _SHOWN + 2 else f"{shown[:_SHOWN]}..."
